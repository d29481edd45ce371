"""The families of targets: what the keys of their config.json mean, and which are refused.

A family is a record here. What its layers have that others lack is a flag of `BodyConfig` or of `DecoderConfig`; how
its checkpoint stores experts is a row of `experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from d2sd.convert.checkpoint.experts import ExpertTensors, expert_counts, per_expert, qwen_experts, stacked
from d2sd.convert.checkpoint.gemma import GEMMA4, gemma3, gemma3_rope, gemma4, gemma4_rope
from d2sd.convert.checkpoint.hf_config import MAX_SIZE, HFConfig
from d2sd.convert.checkpoint.hybrids import hybrid, hybrid_moe, hybrid_rope, qwen3_next
from d2sd.convert.checkpoint.lfm2 import lfm2, lfm2_moe, llama_name
from d2sd.convert.checkpoint.nested import NESTED, text_config, text_name
from d2sd.modeling.config import BodyConfig, DecoderConfig, ExpertsConfig, Family, RopeConfig


@dataclass(frozen=True, slots=True)
class TargetFamily:
    """`read` completes the geometry that all families share, and refuses what the family's model may have besides.

    `rope` is the rotation of layers without a window.
    """

    name: Family  # model_type in config.json
    architecture: str
    read: Callable[[HFConfig, BodyConfig], BodyConfig]
    rope: Callable[[HFConfig], RopeConfig] = HFConfig.rope
    #: Names of a checkpoint's tensors -> those of the text model; None for what is left out.
    rename: Callable[[str], str | None] = str
    experts: ExpertTensors | None = None  # names of their tensors
    scaled_embedding: bool = False  # by √E
    tied: bool = False  # transformers' default of tie_word_embeddings
    width: str = "intermediate_size"  # the key of the MLP's, or of each expert's where no layer has an MLP
    eps: str = "rms_norm_eps"  # the key of the norms' epsilon


def _llama(config: HFConfig, body: BodyConfig) -> BodyConfig:
    config.only("sliding_window", None)  # Qwen writes a width together with use_sliding_window: false
    bias = config.get("attention_bias", bool, False)
    return replace(_dense(config, body), qkv_bias=bias, o_bias=bias)


def _qwen2(config: HFConfig, body: BodyConfig) -> BodyConfig:
    return replace(_dense(config, body), qkv_bias=True)


def _qwen3(config: HFConfig, body: BodyConfig) -> BodyConfig:
    bias = config.get("attention_bias", bool, False)
    return replace(_dense(config, body), qk_norm=True, qkv_bias=bias, o_bias=bias)


def _qwen3_moe(config: HFConfig, body: BodyConfig) -> BodyConfig:
    experts = qwen_experts(config, body.num_layers, normalized=False)
    return replace(_qwen3(config, body), experts=experts)


def _gpt_oss(config: HFConfig, body: BodyConfig) -> BodyConfig:
    config.only("hidden_act", "silu")
    experts = ExpertsConfig(
        *expert_counts(config),
        intermediate_size=body.intermediate_size,
        normalized=True,
        bias=True,
        limit=config.get("swiglu_limit", float, 7.0),  # transformers' constant
    )
    bias = config.get("attention_bias", bool, True)
    windows = config.windows(["sliding_attention", "full_attention"], body.num_layers)
    return replace(body, qkv_bias=bias, o_bias=bias, sinks=True, windows=windows, experts=experts)


def _dense(config: HFConfig, body: BodyConfig) -> BodyConfig:
    """Full attention everywhere, in layers that llama has too."""
    config.only("hidden_act", "silu")
    config.only("mlp_bias", False, None)
    config.only("layer_types", ["full_attention"] * body.num_layers, None)
    config.only("use_sliding_window", False, None)
    return body


#: What to do instead of targets that are asked for.
_UNREAD = {
    "gemma3": "it reads images, and d2sd reads gemma3_text alone: google/gemma-3-270m-it or google/gemma-3-1b-it"
}
FAMILIES: dict[str, TargetFamily] = {
    family.name: family
    for family in (
        TargetFamily("llama", "LlamaForCausalLM", _llama),
        TargetFamily("qwen2", "Qwen2ForCausalLM", _qwen2),
        TargetFamily("qwen3", "Qwen3ForCausalLM", _qwen3),
        TargetFamily("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, experts=per_expert),
        TargetFamily("gpt_oss", "GptOssForCausalLM", _gpt_oss, experts=stacked),
        TargetFamily("gemma3_text", "Gemma3ForCausalLM", gemma3, gemma3_rope, scaled_embedding=True, tied=True),
        *(
            TargetFamily(name, architecture, gemma4, gemma4_rope, text_name, scaled_embedding=True, tied=True)
            for name, architecture in GEMMA4.items()
        ),
        TargetFamily("qwen3_next", "Qwen3NextForCausalLM", qwen3_next, hybrid_rope, text_name, per_expert),
        TargetFamily("qwen3_5_text", "Qwen3_5ForCausalLM", hybrid, hybrid_rope, text_name),
        TargetFamily(
            "qwen3_5_moe_text",
            "Qwen3_5MoeForCausalLM",
            hybrid_moe,
            hybrid_rope,
            text_name,
            per_expert,
            width="moe_intermediate_size",
        ),
        TargetFamily("lfm2", "Lfm2ForCausalLM", lfm2, rename=llama_name, tied=True, eps="norm_eps"),
        TargetFamily(
            "lfm2_moe", "Lfm2MoeForCausalLM", lfm2_moe, rename=llama_name, experts=per_expert, tied=True, eps="norm_eps"
        ),
    )
}


def parse_target_config(config: HFConfig) -> DecoderConfig:
    """Turn a Hugging Face config into our geometry, refusing what `Decoder` does not model.

    Of a model that reads images, too, it is the text model's.
    """
    config = text_config(config)
    model_type = config.get("model_type", str)
    if model_type not in FAMILIES:
        raise config.refuse(
            "This architecture is not supported.",
            "model_type",
            ", ".join((*FAMILIES, *NESTED)),
            _UNREAD.get(model_type, "choose a target of one of these families"),
        )
    family = FAMILIES[model_type]
    config.only("architectures", [family.architecture], None)
    body = family.read(config, _common(config, family))
    if body.rotary_dim is None:
        config.only("partial_rotary_factor", 1.0, None)
    return DecoderConfig(
        family=family.name,
        body=body,
        vocab_size=config.size("vocab_size"),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, family.tied),
        embedding_scale=body.hidden_size**0.5 if family.scaled_embedding else 1.0,
        logit_cap=config.logit_cap() if model_type in GEMMA4 else None,
    )


def _common(config: HFConfig, family: TargetFamily) -> BodyConfig:
    """The geometry that every family writes with the same keys."""
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    if config.values.get("head_dim") is None and hidden % heads:
        raise config.refuse(
            "hidden_size is not a multiple of the number of heads.", "hidden_size", f"a multiple of {heads}"
        )
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.refuse(
            "The number of heads is not a multiple of the number of K/V heads.",
            "num_key_value_heads",
            f"a divisor of {heads}",
        )
    return BodyConfig(
        hidden_size=hidden,
        intermediate_size=config.size(family.width),
        num_layers=config.layers("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config.size("head_dim", hidden // heads, limit=MAX_SIZE // heads),
        rms_norm_eps=config.get(family.eps, float),
        rope=family.rope(config),
        max_positions=config.size("max_position_embeddings"),
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
    )
