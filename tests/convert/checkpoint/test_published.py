"""config.json as it is published on the hub: geometry, and numbers of parameters that the model cards state."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.target_shapes import target_shapes
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DecoderConfig, ExpertsConfig, RopeConfig
from d2sd.recipe import load_recipe
from tests.convert.checkpoint.published import CONFIGS

QWEN3_30B, GPT_OSS_20B, GEMMA_3_1B = (CONFIGS[name] for name in ("qwen3-30b-a3b", "gpt-oss-20b", "gemma-3-1b"))
LFM2_8B = load_recipe(Path("lfm2.5-8b-a1b")).target.geometry or {}
#: Parameters, and those that take part in a row.
PUBLISHED = {
    "Qwen3-30B-A3B": (QWEN3_30B, 30_532_122_624, 3_353_032_704),
    "gpt-oss-20b": (GPT_OSS_20B, 20_914_757_184, 4_188_541_824),
    "gemma-3-1b": (GEMMA_3_1B, 999_885_952, 999_885_952),
}


def parsed(values: dict[str, Any]) -> DecoderConfig:
    return parse_target_config(HFConfig(values, "config.json"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_model_cards(name: str) -> None:
    values, every, active = PUBLISHED[name]
    config = parsed(values)
    found = sum(math.prod(shape) for shape in target_shapes(config).values())
    assert found == every
    experts = config.body.experts
    if experts is not None:
        idle = config.body.expert_weights * (experts.count - experts.chosen) // experts.count
        assert found - idle == pytest.approx(active, rel=0.01)


def test_what_the_keys_mean() -> None:
    body = parsed(GPT_OSS_20B).body
    assert body.experts == ExpertsConfig(32, 4, 2880, normalized=True, bias=True, limit=7.0)
    assert body.windows == (128, None) * 12
    assert body.rope == RopeConfig(150000, "yarn", 32.0, 4096, truncate=False)
    body = parsed(GEMMA_3_1B).body
    assert body.windows == (512,) * 5 + (None,) + ((512,) * 5 + (None,)) * 3 + (512, 512)
    assert (body.rope, body.local_rope) == (RopeConfig(1e6), RopeConfig(1e4))
    assert parsed(GEMMA_3_1B).embedding_scale == 1152**0.5
    assert parsed(GEMMA_3_1B).tie_word_embeddings


@pytest.mark.parametrize(
    ("values", "change", "named"),
    [
        (QWEN3_30B, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        (QWEN3_30B, {"num_experts": None}, "num_experts"),
        (QWEN3_30B, {"num_local_experts": 64}, "num_experts"),
        (QWEN3_30B, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN3_30B, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (QWEN3_30B, {"mlp_only_layers": [48]}, "mlp_only_layers"),
        (GPT_OSS_20B, {"layer_types": ["chunked_attention"] * 24}, "layer_types"),
        (GPT_OSS_20B, {"layer_types": ["full_attention"]}, "layer_types"),
        (GPT_OSS_20B, {"sliding_window": None}, "sliding_window"),
        (GPT_OSS_20B, {"sliding_window": 0}, "sliding_window"),
        (GPT_OSS_20B, {"hidden_act": "gelu"}, "hidden_act"),
        (GEMMA_3_1B, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (GEMMA_3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA_3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA_3_1B, {"hidden_activation": "silu"}, "hidden_activation"),
        (GEMMA_3_1B, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (GEMMA_3_1B, {"query_pre_attn_scalar": None}, "query_pre_attn_scalar"),
        (GEMMA_3_1B, {"rope_parameters": {"full_attention": 3}}, "full_attention"),
        (GEMMA_3_1B, {"model_type": "gemma3"}, "gemma3"),
        (LFM2_8B, {"num_dense_layers": -1}, "num_dense_layers"),
        (LFM2_8B, {"num_dense_layers": 10**12}, "num_dense_layers"),
        (LFM2_8B, {"layer_types": [["conv"], *["full_attention"] * 23]}, "layer_types"),
        (LFM2_8B, {"layer_types": ["conv"] * 24}, "layer_types"),
        (LFM2_8B, {"layer_types": ["conv", "full_attention"]}, "layer_types"),
        (LFM2_8B, {"block_ffn_dim_multiplier": math.inf}, "block_ffn_dim_multiplier"),
        (LFM2_8B, {"block_ffn_dim_multiplier": math.nan}, "block_ffn_dim_multiplier"),
        (LFM2_8B, {"block_ffn_dim_multiplier": -1.0}, "block_ffn_dim_multiplier"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(values: dict[str, Any], change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parsed(values | change)
