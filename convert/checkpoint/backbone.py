"""The Qwen3-shaped body of a drafter's config, which is at the top level (z-lab) or nested (speculators)."""

from __future__ import annotations

from d2sd.convert.checkpoint.hf_config import MAX_SIZE, HFConfig
from d2sd.modeling.config import BodyConfig

#: Keys that `read_body` reads.
READ = frozenset({
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "attention_bias",
    "vocab_size", "layer_types", "hidden_act", "model_type",
})  # fmt: skip
#: Keys that do not affect the forward pass.
INERT = frozenset({
    "auto_map", "attention_dropout", "initializer_range", "use_cache", "max_window_layers", "tie_word_embeddings",
    "dtype", "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path",
})  # fmt: skip


def read_body(config: HFConfig) -> BodyConfig:
    """Read the body; raises `CheckpointError` naming file and key."""
    num_layers, heads = config.layers("num_hidden_layers"), config.size("num_attention_heads")
    config.only("model_type", "qwen3")  # the body's shape, whatever the target's family
    config.only("hidden_act", "silu")
    config.only("layer_types", ["full_attention"] * num_layers, None)
    bias = config.get("attention_bias", bool)
    return BodyConfig(
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=config.size("num_key_value_heads"),
        head_dim=config.size("head_dim", limit=MAX_SIZE // heads),
        rms_norm_eps=config.get("rms_norm_eps", float),
        rope=config.rope(),
        max_positions=config.size("max_position_embeddings"),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )


def body_fields(body: BodyConfig) -> dict[str, object]:
    """Every field of the body except RoPE, which the formats spell differently."""
    assert body.qk_norm, "no layout can represent a drafter without q/k norms"
    assert body.qkv_bias == body.o_bias, "the layouts have one attention_bias for q, k, v and o"
    return {
        "attention_bias": body.qkv_bias,
        "attention_dropout": 0.0,
        "head_dim": body.head_dim,
        "hidden_act": "silu",
        "hidden_size": body.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": body.intermediate_size,
        "layer_types": ["full_attention"] * body.num_layers,
        "max_position_embeddings": body.max_positions,
        "max_window_layers": body.num_layers,
        "model_type": "qwen3",
        "num_attention_heads": body.num_heads,
        "num_hidden_layers": body.num_layers,
        "num_key_value_heads": body.num_kv_heads,
        "rms_norm_eps": body.rms_norm_eps,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
    }
