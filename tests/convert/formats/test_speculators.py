"""Fields that the speculators config omits, and the d2sd key that carries them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.offline import offline_transformers
from d2sd.convert.formats.convert import convert
from d2sd.convert.formats.read import read_drafter
from d2sd.convert.formats.speculators import QWEN3_DEFAULTS, config_text, from_tensors, read_speculators, to_tensors
from d2sd.modeling.config import RopeConfig
from tests.convert.formats.helpers import IDS, extra, reduced, speculators_fields, tiny_pair, write_foreign
from tests.convert.helpers import write_project
from tests.tiny import tiny_decoder, tiny_drafter

LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 8192, 1.0, 4.0)
YARN = RopeConfig(1e6, "yarn", 4.0, 32768, beta_fast=30.0, attention_factor=1.2)


def test_defaults_are_transformers_own() -> None:
    values: dict[str, Any] = offline_transformers().Qwen3Config().to_dict()
    values["rope_theta"] = values["rope_parameters"]["rope_theta"]
    assert {key: values[key] for key in QWEN3_DEFAULTS} == QWEN3_DEFAULTS


def test_a_body_saved_as_a_difference_from_them_is_filled() -> None:
    fields = speculators_fields(tiny_pair()[1])
    del fields["transformer_layer_config"]["rope_parameters"], fields["transformer_layer_config"]["rms_norm_eps"]
    config = read_speculators(HFConfig(fields, "config.json"), 6)
    assert config.body.rope == RopeConfig(10000.0)
    assert config.body.rms_norm_eps == 1e-6


@pytest.mark.parametrize("rope", [RopeConfig(1e4), RopeConfig(1e4, "linear", 2.0), LLAMA3, YARN], ids=lambda r: r.kind)
def test_what_is_written_is_read(rope: RopeConfig) -> None:
    config = tiny_drafter(tiny_decoder(rope=rope).config, role="variable_prefix").config
    text = config_text(config, torch.bfloat16, "somebody/target", ["LlamaForCausalLM"])
    assert read_speculators(HFConfig(json.loads(text), "config.json"), None) == config


def test_every_field_is_written() -> None:
    """With their defaults a reader would draft among 32000 tokens, from the anchor, or without a mask."""
    values = json.loads(config_text(tiny_pair()[1].config, torch.bfloat16, "somebody/target", ["LlamaForCausalLM"]))
    assert values["aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert (values["sample_from_anchor"], values["sliding_window_non_causal"]) == (False, False)
    assert (values["draft_vocab_size"], values["block_size"], values["mask_token_id"]) == (64, 4, 63)
    assert values["d2sd"] == {"num_target_layers": 6, "prefix_weight_base": None, "training_mode": "dflash"}
    assert values["speculators_config"]["verifier"] == {
        "architectures": ["LlamaForCausalLM"], "name_or_path": "somebody/target",
    }  # fmt: skip
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert set(QWEN3_DEFAULTS) - {"rope_theta"} <= values["transformer_layer_config"].keys()
    assert values["transformer_layer_config"]["rope_parameters"] == {"rope_theta": 500000.0, "rope_type": "default"}


def test_d2t_is_an_offset() -> None:
    tensors = to_tensors(IDS, 64)
    assert tensors["d2t"].tolist() == [0, 2, 15, 37, 58]
    assert tensors["t2d"].nonzero().flatten().tolist() == list(IDS)
    assert (tensors["t2d"].dtype, tensors["d2t"].dtype) == (torch.bool, torch.int64)
    assert from_tensors(tensors, 5, 64, "file") == IDS


def test_a_vocabulary_of_all_tokens_is_none(tmp_path: Path) -> None:
    decoder, drafter = tiny_pair()
    tensors = drafter.state_dict() | extra(decoder, drafter) | to_tensors(tuple(range(64)), 64)
    fields = speculators_fields(drafter, d2sd={"num_target_layers": 6})
    assert read_drafter(write_foreign(tmp_path / "s", fields, tensors)).config == drafter.config


def test_a_bundle_is_a_target_and_the_verifier_is_its_target(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project").parent
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "manifest.json").touch()
    (project / "target").rename(bundle / "target")
    convert(project / "second", "speculators", tmp_path / "out", target=bundle)
    values = json.loads((tmp_path / "out/config.json").read_text())
    assert values["speculators_config"]["verifier"]["name_or_path"] == str(bundle / "target")
    assert values["d2sd"]["training_mode"] == "vp_drafter"


def test_a_reduced_head_is_the_targets_rows(tmp_path: Path) -> None:
    decoder, whole = tiny_pair()
    drafter = reduced(whole)
    fields = speculators_fields(drafter, d2sd={"num_target_layers": 6})
    source = write_foreign(tmp_path / "s", fields, drafter.state_dict() | extra(decoder, drafter))
    assert read_drafter(source).config.draft_vocabulary == IDS
