"""Targets with gated delta nets: what the keys of Qwen3-Next's and Qwen3.5's config.json mean."""

from __future__ import annotations

from dataclasses import replace

from d2sd.convert.checkpoint.experts import qwen_experts
from d2sd.convert.checkpoint.hf_config import MAX_SIZE, HFConfig
from d2sd.modeling.config import BodyConfig, RopeConfig
from d2sd.modeling.mixers.configs import DeltaConfig

_DELTA, _FULL = "linear_attention", "full_attention"
_PARTIAL = "partial_rotary_factor"
#: Of images; rows of text have one position, so the sections of a head rotate alike.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def hybrid(config: HFConfig, body: BodyConfig) -> BodyConfig:
    """Qwen3.5, dense."""
    for key, allowed in (("hidden_act", "silu"), ("output_gate_type", "swish"), ("attn_output_gate", True)):
        config.only(key, allowed, None)
    config.only("mamba_ssm_dtype", "float32", None)  # of the states
    config.only("use_sliding_window", False, None)
    bias = config.get("attention_bias", bool, False)
    return replace(
        body,
        head_dim=config.size("head_dim", limit=MAX_SIZE // body.num_heads),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        norm_offset=True,
        recurrent=_delta(config, body.num_layers),
        rotary_dim=_rotary_dim(config, config.size("head_dim")),
        output_gate=True,
    )


def hybrid_moe(config: HFConfig, body: BodyConfig) -> BodyConfig:
    """Qwen3.5 with experts in every layer."""
    config.only("norm_topk_prob", True, None)
    return _with_experts(config, hybrid(config, body))


def qwen3_next(config: HFConfig, body: BodyConfig) -> BodyConfig:
    """Qwen3-Next, which joins the projections of a key head's group, and may have dense layers."""
    body = _with_experts(config, hybrid(config, body))
    assert isinstance(body.recurrent, DeltaConfig)
    return replace(body, recurrent=replace(body.recurrent, joined=True))


def hybrid_rope(config: HFConfig) -> RopeConfig:
    """The rotation, without the keys that say which numbers rotate."""
    values = dict(config.values)
    values.pop(_PARTIAL, None)
    for key in ("rope_parameters", "rope_scaling"):
        part = values.get(key)
        if isinstance(part, dict):
            values[key] = {name: value for name, value in part.items() if name not in (_PARTIAL, *_OF_IMAGES)} or None
    return HFConfig(values, config.where).rope()


def _with_experts(config: HFConfig, body: BodyConfig) -> BodyConfig:
    experts = qwen_experts(config, body.num_layers, normalized=True)
    if experts is None:
        return body
    return replace(body, experts=replace(experts, shared_size=config.size("shared_expert_intermediate_size")))


def _delta(config: HFConfig, num_layers: int) -> DeltaConfig:
    config.only("linear_conv_kernel_dim", 4)
    every = config.size("full_attention_interval", 4)
    usual = [_FULL if (layer + 1) % every == 0 else _DELTA for layer in range(num_layers)]
    types = config.layer_types(usual, _DELTA, _FULL, both=True)
    keys = config.size("linear_num_key_heads")
    values = config.size("linear_num_value_heads")
    if values % keys:
        what = "The number of value heads is not a multiple of the number of key heads."
        raise config.refuse(what, "linear_num_value_heads", f"a multiple of {keys}")
    return DeltaConfig(
        layers=tuple(layer for layer, kind in enumerate(types) if kind == _DELTA),
        key_heads=keys,
        value_heads=values,
        key_size=config.size("linear_key_head_dim", limit=MAX_SIZE // values),
        value_size=config.size("linear_value_head_dim", limit=MAX_SIZE // values),
    )


def _rotary_dim(config: HFConfig, head_dim: int) -> int | None:
    """How many numbers of a head rotate; None: all. Without the key it is a quarter, as in transformers."""
    part = HFConfig(config.get("rope_parameters", dict, {}), f"{config.where}: rope_parameters")
    where = part if part.values.get(_PARTIAL) is not None else config
    factor = where.get(_PARTIAL, float, 0.25)
    size = int(head_dim * factor)
    if not 0 < factor <= 1 or size % 2 or not size:
        raise where.refuse("The part of a head that rotates is out of range.", _PARTIAL, "an even part of a head")
    return None if size == head_dim else size
