"""config.json as it is published on the hub: geometry, and numbers of parameters that the model cards state."""

from __future__ import annotations

import math
from typing import Any

import pytest

from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.target_shapes import target_shapes
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DecoderConfig, ExpertsConfig, RopeConfig

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
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
        (GEMMA_3_1B, {"model_type": "gemma4_text"}, "heads of another size"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(values: dict[str, Any], change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parsed(values | change)
