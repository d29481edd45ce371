"""Every key that marks another model is found at every level of the config, and other projects' configs are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.unsupported import refuse_unsupported
from d2sd.convert.formats.read import detect, read_drafter
from d2sd.errors import CheckpointError
from tests.convert.formats.helpers import modelopt_fields, public_fields, speculators_fields, tiny_pair, write_foreign
from tests.convert.helpers import edit_tensors

DRAFTER = tiny_pair()[1]
#: What other projects write -> one value that changes what the drafter is, and what it is called.
MARKS: dict[str, tuple[Any, str]] = {
    "projector_type": ("domino", "drafter with a projector"),
    "gru_hidden_dim": (1024, "Domino drafter"),
    "emb_dim": (256, "Domino drafter"),
    "pure_draft_prefix_len": (1, "Domino drafter"),
    "flexdraft_config": ({"target_layer_ids": [4]}, "FlexDraft drafter"),
    "enable_anchor_bias_logits": (True, "FlexDraft drafter"),
    "anchor_bias_rank": (256, "FlexDraft drafter"),
    "eagle_config": ({}, "EAGLE-3 drafter"),
    "spec_decode_type": ("dflash", "Edge-LLM export"),
    "engine_role": ("draft", "Edge-LLM export"),
    "mapping": ({"tp_size": 1}, "TensorRT-LLM checkpoint"),
    "attention_value_scale": (0.5, "another attention"),
    "attention_mode": ("mla", "another attention"),
    "output_multiplier": (2.0, "altered logits"),
    "use_aux_hidden_state": (False, "target features"),
}
#: A value beside which the same key says nothing.
HARMLESS: dict[str, Any] = {
    "projector_type": "none",
    "shift_label": False,
    "sample_from_anchor": False,
    "markov_rank": 0,
    "causal": False,
    "is_causal": False,
    "use_swa": False,
    "swa_window_size": None,
    "sliding_window": None,
    "attention_sink_bias": False,
    "output_multiplier": 1.0,
    "use_aux_hidden_state": True,
    "mask_token": "<|MASK|>",
}
#: Name of a part -> the config of a drafter, and where in it the key is put.
PLACES = {
    "z-lab": (public_fields, None),
    "dflash_config": (public_fields, "dflash_config"),
    "speculators": (speculators_fields, None),
    "transformer_layer_config": (speculators_fields, "transformer_layer_config"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("key", MARKS)
def test_a_key_of_another_model_is_seen_wherever_it_stands(key: str, place: str) -> None:
    make, part = PLACES[place]
    fields = make(DRAFTER)
    detect(HFConfig(fields, "config.json"))
    (fields[part] if part else fields)[key], name = MARKS[key]
    where = f"config.json: {part}: {key}" if part else f"config.json: {key}"
    with pytest.raises(CheckpointError, match=rf"{name}, which d2sd does not run(.|\n)*{where}\n"):
        detect(HFConfig(fields, "config.json"))


@pytest.mark.parametrize("key", HARMLESS)
def test_a_key_that_says_nothing_is_read_over(tmp_path: Path, key: str) -> None:
    fields = public_fields(DRAFTER)
    fields["dflash_config"][key] = HARMLESS[key]
    assert read_drafter(write_foreign(tmp_path / "a", fields, DRAFTER.state_dict())).config == DRAFTER.config


def modelopt(inside: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    fields = modelopt_fields(DRAFTER) | top
    return fields | {"dflash_config": fields["dflash_config"] | inside}


#: Exports that keep the name DFlashDraftModel, and others' whole configs -> what they are called.
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "ModelOpt's Domino": (
        modelopt({"projector_type": "domino", "shift_label": True, "gru_hidden_dim": 64}, {"emb_dim": 16}),
        "Domino drafter",
    ),
    "FlexDraft as published": (
        public_fields(DRAFTER)
        | {"dflash_config": {"target_layer_ids": [4, 5], "enable_anchor_bias_logits": True, "anchor_bias_rank": 256}},
        "FlexDraft drafter",
    ),
    "ModelOpt's FP8": (  # a recipe's reader takes it; a conversion does not
        modelopt({}, {"quantization_config": {"quant_algo": "FP8", "quant_method": "modelopt"}}),
        "quantized checkpoint",
    ),
    "compressed-tensors": (
        public_fields(DRAFTER) | {"quantization_config": {"quant_method": "compressed-tensors"}},
        "quantized checkpoint",
    ),
}


def test_the_article_follows_the_name() -> None:
    for architecture, told in (("EAGLE3LlamaForCausalLM", "an EAGLE-3"), ("DominoDraftModel", "a Domino")):
        with pytest.raises(CheckpointError, match=f"This is {told} drafter"):
            refuse_unsupported(HFConfig({"architectures": [architecture]}, "here"))


@pytest.mark.parametrize(("fields", "name"), CONFIGS.values(), ids=CONFIGS)
def test_a_whole_config_of_another_project_is_called_by_its_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"This is an? {name}, which d2sd does not run"):
        detect(HFConfig(fields, "config.json"))


@pytest.mark.parametrize("name", ["mask_embedding", "markov_head.markov_w1.weight", "prefix_gru.weight_ih_l0", "d2t"])
def test_a_tensor_of_another_model_is_named_where_no_key_tells(tmp_path: Path, name: str) -> None:
    folder = write_foreign(tmp_path / "a", public_fields(DRAFTER), DRAFTER.state_dict())
    edit_tensors(folder / "model.safetensors", **{name.replace(".", "__"): torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match=rf"unknown {name}|{name}\n  found: \[2, 2\]\n  expected: \[32\]"):
        read_drafter(folder)
