"""Gemma 4 as transformers saves it whole, with what reads images and audio; what is refused; drafters of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.target import load_target, write_target
from d2sd.convert.checkpoint.target_shapes import left_out, target_shapes
from d2sd.convert.kinds import DFLASH
from d2sd.errors import CheckpointError, D2SDError
from d2sd.modeling.config import RopeConfig
from d2sd.modeling.shard import check_divisible
from d2sd.policies import DrafterRole
from d2sd.recipe import load_recipe
from tests.convert.helpers import edit_json, write_target_dir
from tests.tiny import full_logits, random_tokens, tiny_decoder, tiny_drafter

GEMMA_31B: dict[str, Any] = dict(load_recipe(Path("gemma-4-31b")).target.geometry or {})
#: What public runtimes list of the 12B, where it differs.
GEMMA_12B = GEMMA_31B | {
    "model_type": "gemma4_unified_text",
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 1,
}
_TEXT = {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "final_logit_softcapping": 3.0,
}
_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_TOWERS = {
    "gemma4": {
        "vision_config": _TOWER | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 8},
        "audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16},
    },
    "gemma4_unified": {
        "vision_config": {"patch_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32},
        "audio_config": {"audio_embed_dim": 16},
    },
}


@pytest.mark.parametrize("kind", _TOWERS)
@torch.no_grad()
def test_the_text_model_of_a_whole_one_is_read_and_written_alone(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, text_config=_TEXT | {"model_type": f"{kind}_text"}, **_TOWERS[kind])
    whole = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    for name, tensor in whole.state_dict().items():
        if name.startswith("model.language_model."):
            noise = torch.randn_like(tensor)
            tensor.copy_(1 + 0.3 * noise if tensor.dim() == 1 else noise * tensor.shape[-1] ** -0.5)
    whole.save_pretrained(tmp_path / "whole")
    write_target_dir(tmp_path / "text", tiny_decoder())  # a tokenizer
    read = load_target(tmp_path / "whole", torch.float32)
    assert left_out(tmp_path / "whole", read.config).keys() == {"images", "audio"}
    tokens = random_tokens(read, 2, 12)
    expected = whole(input_ids=tokens, mm_token_type_ids=torch.zeros_like(tokens)).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(full_logits(read, tokens), expected, rtol=0, atol=1e-4)

    write_target(tmp_path / "whole", tmp_path / "written", "fp32", text_side=tmp_path / "text")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "written", attn_implementation="eager").eval()
    assert alone.config.model_type == f"{kind}_text"
    torch.testing.assert_close(alone(input_ids=tokens).logits, expected, rtol=0, atol=1e-4)
    assert load_target(tmp_path / "written", torch.float32).config == read.config


def test_what_the_keys_mean() -> None:
    config = parse_target_config(HFConfig(GEMMA_31B, "config.json"))
    body = config.body
    assert body.windows == ((1024,) * 5 + (None,)) * 10
    assert (body.rope, body.local_rope) == (RopeConfig(1e6, turning=0.25), RopeConfig(1e4))
    assert config.logit_cap == 30
    assert config.embedding_scale == 5376**0.5
    local, everywhere = body.at(0), body.at(5)
    assert (local.num_kv_heads, local.head_dim, local.query_scale) == (16, 256, 16)
    assert (everywhere.num_kv_heads, everywhere.head_dim) == (4, 512)
    assert everywhere.query_scale == pytest.approx(512**0.5)
    assert not local.keys_are_values
    assert everywhere.keys_are_values


def test_the_12b_has_the_numbers_of_its_card() -> None:
    shapes = target_shapes(parse_target_config(HFConfig(GEMMA_12B, "config.json")))
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == pytest.approx(11.95e9, rel=0.005)


@pytest.mark.parametrize("values", [GEMMA_31B, GEMMA_12B], ids=["31B", "12B"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input(.|\n)*fix: choose gemma-4-12B-it or"),
        ({"num_kv_shared_layers": 18}, "num_kv_shared_layers(.|\n)*found: 18(.|\n)*expected: 0"),
        ({"enable_moe_block": True}, "enable_moe_block"),
        ({"attention_k_eq_v": False}, "attention_k_eq_v"),
        ({"attention_k_eq_v": None}, "attention_k_eq_v"),
        ({"num_global_key_value_heads": 3}, "num_global_key_value_heads"),
        ({"num_global_key_value_heads": None}, "num_global_key_value_heads"),
        ({"global_head_dim": 0}, "global_head_dim"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}}, "rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional", "factor": 2.0}}}, "factor"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
            "partial_rotary_factor",
        ),
    ],
    ids=str,
)
def test_what_is_not_modelled_is_refused_by_name(values: dict[str, Any], change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=f"where: config.json: (.|\n)*{named}"):
        parse_target_config(HFConfig(values | change, "config.json"))


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"])
def test_parts_that_transformers_has_by_default_are_refused(kind: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"part of Gemma 4 is not supported(.|\n)*fix: choose gemma-4-12B-it"):
        parse_target_config(HFConfig.read(tmp_path))


def test_ranks_do_not_share_it() -> None:
    with pytest.raises(D2SDError, match=r"Heads of two sizes are not divided(.|\n)*expected: one rank"):
        check_divisible(tiny_decoder("gemma4_text").config, 2)


def test_a_drafter_says_how_its_target_caps_logits(tmp_path: Path) -> None:
    """z-lab's key is read and written; one that says nothing is read too, and one for another cap is refused."""
    target = tiny_decoder("gemma4_text").config
    drafter = tiny_drafter(target)
    config = drafter.config
    DFLASH.write(tmp_path, config, drafter.state_dict())
    assert json.loads((tmp_path / "config.json").read_text())["final_logit_softcapping"] == target.logit_cap
    assert DFLASH.read_config(tmp_path) == config
    DFLASH.check(config, target, DrafterRole.FIRST, 4, tmp_path)
    DFLASH.check(replace(config, logit_cap=None), target, DrafterRole.FIRST, 4, tmp_path)
    edit_json(tmp_path / "config.json", "final_logit_softcapping", 30.0)
    with pytest.raises(CheckpointError, match=r"final_logit_softcapping(.|\n)*found: 30.0(.|\n)*expected: 5.0"):
        DFLASH.check(DFLASH.read_config(tmp_path), target, DrafterRole.FIRST, 4, tmp_path)
