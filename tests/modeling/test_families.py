"""Targets that transformers saved, read from disk: their logits are transformers', however they are run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.kv_pool import Chunks, KVPool
from d2sd.modeling.where import Where
from tests.modeling.hybrids import Pair, check_features
from tests.tiny import feed, full_logits, pool_for, random_tokens

#: Of logits whose spread is about 3, in fp32: far above rounding (1e-5), far below any mistake.
TOLERANCE = 1e-4
_BODY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_MOE = _BODY | {
    "intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
#: Windows that bind within the 40 tokens of a test, and YaRN's ramp within half a head.
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 64, "truncate": False}
_GPT_OSS = _BODY | {
    "intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 7,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, **_YARN},
}
_GEMMA3 = _BODY | {
    "intermediate_size": 48,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
}
#: Sliding layers of 2 K/V heads of 16, others of 1 of 512, of which a quarter of the angles turns.
_GEMMA4 = _BODY | {
    "intermediate_size": 48,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 64,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "global_head_dim": 512,
    "final_logit_softcapping": 4.0,
}
#: Configs of transformers' models.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-30B-A3B": ("qwen3_moe", _MOE),
    "Qwen3-MoE, weights not normalized": ("qwen3_moe", _MOE | {"norm_topk_prob": False}),
    "Qwen3-MoE, every second layer dense": ("qwen3_moe", _MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "Qwen3-MoE, all layers dense": ("qwen3_moe", _MOE | {"mlp_only_layers": [0, 1, 2, 3]}),
    "gpt-oss": ("gpt_oss", _GPT_OSS),
    "gpt-oss, biases on the experts alone": ("gpt_oss", _GPT_OSS | {"attention_bias": False, "sliding_window": 1}),
    "Gemma 3": ("gemma3_text", _GEMMA3 | {"tie_word_embeddings": True}),
    "Gemma 3, scaled RoPE": (
        "gemma3_text",
        _GEMMA3
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            }
        },
    ),
    "Gemma 4": ("gemma4_text", _GEMMA4 | {"tie_word_embeddings": True}),
    "Gemma 4 12B, wider global layers": (
        "gemma4_unified_text",
        _GEMMA4
        | {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "num_global_key_value_heads": 2,
            "global_head_dim": 48,
            "attention_bias": True,
            "final_logit_softcapping": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            },
        },
    ),
}
cases = pytest.mark.parametrize("case", CONFIGS)


@cache
def pair(case: str) -> Pair:
    """transformers' model of random weights, and what is read of the folder that it saves."""
    kind, fields = CONFIGS[case]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{"tie_word_embeddings": False} | fields)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        scales = [(name, each) for name, each in theirs.named_buffers() if name.endswith("layer_scalar")]
        for name, parameter in (*theirs.named_parameters(), *scales):
            noise = torch.randn_like(parameter)
            parameter.copy_(0.3 * noise if "norm" in name and kind == "gemma3_text" else _random(name, noise))
    return Pair.of(theirs)


def _random(name: str, noise: Tensor) -> Tensor:
    """Draws weights whose logits spread by about 3; inputs of gpt-oss's SwiGLU exceed its limit here and there."""
    if "norm" in name or "layer_scalar" in name:
        return 1 + 0.3 * noise
    gains = {"embed_tokens": 3.0, "lm_head": 3.0, "gate_up_proj": 3.0}
    gain = next((gain for part, gain in gains.items() if part in name), 1.0)
    return noise * (0.5 if noise.dim() == 1 else gain * noise.shape[-1] ** -0.5)


@cases
@pytest.mark.parametrize("batch", [1, 8])
def test_one_pass(case: str, batch: int) -> None:
    tokens = random_tokens(pair(case).ours, batch, 40)
    expected = pair(case).expected(tokens)
    assert expected.std() > 1
    torch.testing.assert_close(full_logits(pair(case).ours, tokens), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.sampled(3)
@cases
@pytest.mark.parametrize("batch", [1, 8])
def test_prompt_in_chunks_then_decoding(case: str, batch: int) -> None:
    decoder = pair(case).copy()
    tokens = random_tokens(decoder, batch, 40)
    pool, table = pool_for(decoder.config.body, batch, 40)
    logits, done = [], 0
    for size in (7, 16, 9, 1, 1, 5, 1):  # prompt, tokens, a chain that is accepted
        context = torch.full((batch,), done)
        if size > 5:
            logits.append(decoder.logits(prompt_chunk(decoder, tokens[:, done : done + size], pool, table, context)))
        else:
            logits.append(decoder.logits(feed(decoder, tokens[:, done : done + size], pool, table, context).hidden))
        done += size
    torch.testing.assert_close(torch.cat(logits, 1), pair(case).expected(tokens), rtol=0, atol=TOLERANCE)


@cases
@torch.no_grad()
def test_features_are_outputs_of_the_layers(case: str) -> None:
    """Served on a CPU: of the first layer, of one in the middle, and of the last one, before the last norm."""
    check_features(pair(case).copy(), pair(case).theirs, (0, 2, 3), TOLERANCE)


def prompt_chunk(decoder: Decoder, tokens: Tensor, pool: KVPool, table: Tensor, context: Tensor) -> Tensor:
    """The next rows of each prompt, one prompt behind the other -> hidden [B, T, E]."""
    chunks = Chunks.of([tokens.shape[1]] * len(tokens), Where(table, context), pool.page_size)
    out = decoder(tokens.reshape(1, -1), chunks, pool, (0,))
    pool.write_rows(out.k[:, 0], out.v[:, 0], chunks.pages, chunks.positions[0])
    hidden: Tensor = out.hidden.view(*tokens.shape, -1)
    return hidden


def rows_alone(decoder: Decoder, tokens: Tensor, sizes: tuple[int, ...]) -> Iterator[Tensor]:
    """Hidden states of one prompt fed in pieces."""
    pool, table = pool_for(decoder.config.body, len(tokens), tokens.shape[1], dtype=decoder.embed_tokens.weight.dtype)
    done = 0
    for size in sizes:
        yield feed(decoder, tokens[:, done : done + size], pool, table, torch.full((len(tokens),), done)).hidden
        done += size


@pytest.mark.sampled(3)
@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_a_row_are_its_own(case: str, dtype: torch.dtype) -> None:
    """Served on a CPU: with others in the batch, and with other rows of its own, as one token after the other."""
    decoder = pair(case).copy(dtype)
    tokens = random_tokens(decoder, 5, 24)
    alone = torch.cat([*rows_alone(decoder, tokens[2:3], (1,) * 24)], 1)
    for sizes in ((24,), (9, 15), (1, 8, 8, 7)):
        together = torch.cat([*rows_alone(decoder, tokens, sizes)], 1)
        assert torch.equal(together[2:3], alone), sizes
