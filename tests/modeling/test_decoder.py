"""The decoder against transformers' models, and every way of running it against its own single causal pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from d2sd.modeling.config import BodyConfig, DecoderConfig, RopeConfig
from d2sd.modeling.decoder import Decoder
from tests.tiny import feed, full_logits, pool_for, random_tokens, tiny_decoder

#: Of logits whose spread is about 3, in fp32: far above rounding (1e-5), far below any mistake.
TOLERANCE = 1e-4


def transformers_twin(decoder: Decoder, rope_parameters: dict[str, Any] | None = None) -> Any:
    """transformers' model with the same weights: its names are ours with `model.` in front, and none is left over."""
    body = decoder.config.body
    fields: dict[str, Any] = {
        "vocab_size": decoder.config.vocab_size,
        "hidden_size": body.hidden_size,
        "intermediate_size": body.intermediate_size,
        "num_hidden_layers": body.num_layers,
        "num_attention_heads": body.num_heads,
        "num_key_value_heads": body.num_kv_heads,
        "rms_norm_eps": body.rms_norm_eps,
        "max_position_embeddings": body.max_positions,
        "tie_word_embeddings": decoder.config.tie_word_embeddings,
        "rope_parameters": rope_parameters or {"rope_type": "default", "rope_theta": body.rope.theta},
    }
    config: PretrainedConfig
    if decoder.config.family == "qwen2":
        config = Qwen2Config(**fields)  # knows no head_dim: always hidden / heads
    elif decoder.config.family == "qwen3":
        config = Qwen3Config(**fields, head_dim=body.head_dim, attention_bias=body.qkv_bias)
    else:
        config = LlamaConfig(**fields, head_dim=body.head_dim, attention_bias=body.qkv_bias)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    weights = {name if name == "lm_head.weight" else f"model.{name}": w for name, w in decoder.state_dict().items()}
    if decoder.config.tie_word_embeddings:
        weights["lm_head.weight"] = decoder.embed_tokens.weight
    model.load_state_dict(weights, strict=True)
    return model


@torch.no_grad()
def assert_equal_logits(decoder: Decoder, twin: Any, length: int = 24) -> None:
    tokens = random_tokens(decoder, 2, length)
    torch.testing.assert_close(full_logits(decoder, tokens), twin(tokens).logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("tie", [True, False], ids=["tied head", "untied head"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"family": "llama"}, id="llama"),
        pytest.param({"family": "llama", "attention_bias": True}, id="llama with biases on q, k, v and o"),
        pytest.param({"family": "llama", "heads": 6, "kv_heads": 2, "hidden": 48}, id="llama, GQA 3:1 as SmolLM2"),
        pytest.param({"family": "qwen2"}, id="qwen2: bias on q, k, v, none on o"),
        pytest.param({"family": "qwen3"}, id="qwen3: norms on q and k"),
        pytest.param({"family": "qwen3", "head_dim": 12}, id="qwen3, heads wider together than hidden"),
        pytest.param({"family": "qwen3", "attention_bias": True}, id="qwen3 with biases"),
    ],
)
def test_logits_equal_transformers(shape: dict[str, Any], tie: bool) -> None:
    decoder = tiny_decoder(**shape, tie=tie)
    assert_equal_logits(decoder, transformers_twin(decoder))


#: RoPE kinds: our config and Hugging Face's for the same thing. head_dim 16 gives wavelengths 6, 20, 63, ... 20,000, so
#: an original context of 32 has frequencies that are kept, stretched and interpolated; prompts run beyond it.
ROPES = [
    pytest.param(RopeConfig(10000.0), {"rope_type": "default"}, id="default"),
    pytest.param(RopeConfig(10000.0, "linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}, id="linear"),
    pytest.param(
        RopeConfig(10000.0, "llama3", factor=8.0, original_max_positions=32, low_freq_factor=1.0, high_freq_factor=4.0),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        id="llama3, the factors of Llama-3.1",
    ),
    pytest.param(
        RopeConfig(10000.0, "yarn", factor=4.0, original_max_positions=32),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        id="yarn as Qwen3's long-context setting: attention factor left to the formula",
    ),
    pytest.param(
        RopeConfig(10000.0, "yarn", factor=4.0, original_max_positions=32, attention_factor=0.7),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 0.7},
        id="yarn, attention factor given",
    ),
    pytest.param(
        RopeConfig(10000.0, "yarn", factor=2.0, original_max_positions=256, beta_fast=2.0, beta_slow=0.25),
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 2.0,
            "beta_slow": 0.25,
        },
        id="yarn, other betas: each moves its end of the ramp by a whole dimension",
    ),
    pytest.param(
        RopeConfig(10000.0, "yarn", factor=1.0, original_max_positions=32),
        {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32},
        id="yarn of factor 1 changes nothing",
    ),
]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("rope", "theirs"), ROPES)
def test_logits_equal_transformers_under_every_rope(rope: RopeConfig, theirs: dict[str, Any], family: Any) -> None:
    decoder = tiny_decoder(family, hidden=64, head_dim=16, layers=2, rope=rope)
    assert_equal_logits(decoder, transformers_twin(decoder, {"rope_theta": rope.theta, **theirs}), length=48)


def test_features_are_outputs_of_the_tapped_layers() -> None:
    """Id i is the output of layer i, Hugging Face's hidden_states[i + 1]; side by side in the order asked for."""
    decoder = tiny_decoder(layers=5)
    tokens = random_tokens(decoder, 2, 9)
    with torch.no_grad():
        hidden_states = transformers_twin(decoder)(tokens, output_hidden_states=True).hidden_states
    for aux_layer_ids in [(0,), (1, 3), (0, 1, 2, 3)]:
        expected = torch.cat([hidden_states[i + 1] for i in aux_layer_ids], dim=-1)
        torch.testing.assert_close(
            decoder.full_pass(tokens, aux_layer_ids=aux_layer_ids).features, expected, rtol=0, atol=TOLERANCE
        )
    assert decoder.full_pass(tokens).features.shape == (2, 9, 0)


def test_feature_of_the_last_layer_is_not_normed() -> None:
    """The exception to hidden_states[i + 1]: transformers' last entry has gone through the final norm."""
    decoder = tiny_decoder(layers=2)
    tokens = random_tokens(decoder, 1, 5)
    twin = transformers_twin(decoder)
    seen: list[Tensor] = []
    twin.model.layers[-1].register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        hidden_states = twin(tokens, output_hidden_states=True).hidden_states
    out = decoder.full_pass(tokens, aux_layer_ids=(1,))
    torch.testing.assert_close(out.features, seen[0], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(out.hidden, hidden_states[-1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([1] * 17, id="token by token"),
        pytest.param([4, 4, 4, 4, 1], id="whole pages"),
        pytest.param([3, 7, 2, 5], id="chunks across page borders"),
        pytest.param([16, 1], id="a prompt and the first decoded token"),
    ],
)
def test_chunks_through_pages_equal_one_pass(sizes: list[int]) -> None:
    decoder = tiny_decoder("qwen3")
    tokens = random_tokens(decoder, 2, sum(sizes))
    whole = decoder.full_pass(tokens, aux_layer_ids=(0, 1))
    pool, page_table = pool_for(decoder.config.body, 2, sum(sizes), page_size=4)
    done, hidden, features = 0, [], []
    for size in sizes:
        chunk = tokens[:, done : done + size]
        out = feed(decoder, chunk, pool, page_table, torch.tensor([done, done]), aux_layer_ids=(0, 1))
        hidden.append(out.hidden)
        features.append(out.features)
        done += size
    torch.testing.assert_close(decoder.logits(torch.cat(hidden, 1)), decoder.logits(whole.hidden), rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.cat(features, 1), whole.features, rtol=0, atol=1e-4)


def test_low_precision_keeps_logits_wide() -> None:
    """A bf16 model: K, V and features in bf16, logits in fp32, and text close to the fp32 model's."""
    decoder = tiny_decoder()
    tokens = random_tokens(decoder, 1, 12)
    exact = full_logits(decoder, tokens)
    narrow = decoder.to(torch.bfloat16)
    pool, page_table = pool_for(decoder.config.body, 1, 12, dtype=torch.bfloat16)
    out = feed(narrow, tokens, pool, page_table, torch.tensor([0]), aux_layer_ids=(0,))
    assert {out.k.dtype, out.v.dtype, out.hidden.dtype, out.features.dtype} == {torch.bfloat16}
    logits = narrow.logits(out.hidden)
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().mean() < 0.05 * exact.std()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1500)
def test_smollm2_logits_equal_transformers(smollm2_dir: Path) -> None:
    """The real target, its prompt fed in chunks through pages."""
    theirs = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32, attn_implementation="eager").eval()
    c = theirs.config
    body = BodyConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope=RopeConfig(c.rope_parameters["rope_theta"]),
        max_positions=c.max_position_embeddings,
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
    )
    with torch.device("meta"):  # no time spent on random numbers that are replaced at once
        decoder = Decoder(DecoderConfig("llama", body, c.vocab_size, c.tie_word_embeddings))
    weights = {name: weight.float() for name, weight in load_file(smollm2_dir / "model.safetensors").items()}
    decoder.load_state_dict({name.removeprefix("model."): w for name, w in weights.items()}, strict=True, assign=True)
    decoder.eval().requires_grad_(False)

    tokens = torch.arange(100, 100 + 37 * 431, 431).remainder(c.vocab_size)[None]
    pool, page_table = pool_for(body, 1, tokens.shape[1], page_size=16)
    done, hidden = 0, []
    for size in (20, 16, 1):
        hidden.append(feed(decoder, tokens[:, done : done + size], pool, page_table, torch.tensor([done])).hidden)
        done += size
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(decoder.logits(torch.cat(hidden, 1)), expected, rtol=0, atol=1e-4)
