"""Gemma 3 and 4: what the keys of their text models' config.json mean.

Both have windows in most layers, with a RoPE of their own. In Gemma 4 the other layers have K/V heads of another size,
whose values are made of the keys' product, and rotate a part of each head alone.
"""

from __future__ import annotations

from dataclasses import replace

from d2sd.convert.checkpoint.hf_config import MAX_SIZE, HFConfig
from d2sd.modeling.config import BodyConfig, Family, RopeConfig

#: Text models of Gemma 4 by model_type, and their classes: they differ in defaults alone.
GEMMA4: dict[Family, str] = {"gemma4_text": "Gemma4ForCausalLM", "gemma4_unified_text": "Gemma4UnifiedForCausalLM"}
#: Keys of parts of Gemma 4 that only some models have: transformers' default, and the value that is read.
_PARTS = {
    "hidden_size_per_layer_input": (256, 0),
    "num_kv_shared_layers": (0, 0),
    "enable_moe_block": (False, False),
    "attention_k_eq_v": (False, True),
}
_GLOBAL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}


def gemma3(config: HFConfig, body: BodyConfig) -> BodyConfig:
    """Gemma 3's text model."""
    config.only("hidden_activation", "gelu_pytorch_tanh")
    config.only("use_bidirectional_attention", False, None)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.only(key, None)
    every = max(config.size("_sliding_window_pattern", config.size("sliding_window_pattern", 6)), 1)
    windows = config.windows(["sliding_attention"] * (every - 1) + ["full_attention"], body.num_layers)
    scalar = config.get("query_pre_attn_scalar", float)
    if not 0 < scalar <= MAX_SIZE:
        raise config.refuse("The scale of queries is out of range.", "query_pre_attn_scalar", f"up to {MAX_SIZE}")
    bias = config.get("attention_bias", bool, False)
    local = _rope(config, "sliding_attention", {"rope_theta": config.get("rope_local_base_freq", float, 1e4)})
    return replace(
        body,
        local_rope=local if any(windows) else None,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        windows=windows,
        activation="gelu_tanh",
        norm_offset=True,
        branch_norms=True,
        query_scale=(body.head_dim / scalar) ** 0.5,
    )


def gemma3_rope(config: HFConfig) -> RopeConfig:
    """The rotation of its layers without a window."""
    old = {"rope_theta": config.get("rope_theta", float, 1e6), "rope_scaling": config.values.get("rope_scaling")}
    return _rope(config, "full_attention", old)


def _rope(config: HFConfig, kind: str, before: dict[str, object]) -> RopeConfig:
    """Rotation of a kind of layer: under its name in `rope_parameters` (transformers 5), or by the keys `before`."""
    kinds = HFConfig(config.get("rope_parameters", dict, {}), f"{config.where}: rope_parameters")
    new = kinds.get(kind, dict, {})
    values = {"rope_parameters": {"rope_theta": before["rope_theta"]} | new} if new else before
    return HFConfig(
        values | {"max_position_embeddings": config.values.get("max_position_embeddings")}, config.where
    ).rope()


def gemma4(config: HFConfig, body: BodyConfig) -> BodyConfig:
    """The text model of a dense Gemma 4 without inputs by layer: 12B and 31B."""
    for key, (usual, read) in _PARTS.items():
        if key == "hidden_size_per_layer_input" and config.values["model_type"] == "gemma4_unified_text":
            usual = read  # a key that it does not have
        value = config.values.get(key)
        if (usual if value is None else value) != read:
            what, fix = "This part of Gemma 4 is not supported.", "choose gemma-4-12B-it or gemma-4-31B-it"
            raise config.refuse(what, key, str(read).lower(), fix)
    config.only("hidden_activation", "gelu_pytorch_tanh")
    config.only("use_bidirectional_attention", "vision", None)  # among the tokens of an image
    windows = config.windows(["sliding_attention"] * 5 + ["full_attention"], body.num_layers)
    size, kv_heads = config.size("head_dim"), config.size("num_global_key_value_heads")
    if body.num_heads % kv_heads:
        what = "The number of heads is not a multiple of the number of K/V heads."
        raise config.refuse(what, "num_global_key_value_heads", f"a divisor of {body.num_heads}")
    bias = config.get("attention_bias", bool, False)
    return replace(
        body,
        head_dim=size,
        global_heads=(kv_heads, config.size("global_head_dim", limit=MAX_SIZE // body.num_heads)),
        local_rope=_rope(config, "sliding_attention", {"rope_theta": 1e4}),
        qk_norm=True,
        value_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        windows=(*windows[:-1], None),  # transformers makes the last one full, whatever the config says
        activation="gelu_tanh",
        wide_norms=True,
        branch_norms=True,
        layer_scale=True,
        query_scale=size**0.5,
    )


def gemma4_rope(config: HFConfig) -> RopeConfig:
    """The rotation of layers without a window: the first angles of each head, at the frequencies of a whole one."""
    kinds = HFConfig(config.get("rope_parameters", dict, {}), f"{config.where}: rope_parameters")
    part = HFConfig(kinds.get("full_attention", dict, _GLOBAL_ROPE), f"{kinds.where}: full_attention")
    part.required("rope_type", "proportional")
    if unknown := part.values.keys() - _GLOBAL_ROPE.keys():
        raise part.refuse("This RoPE setting is not supported.", min(unknown), ", ".join(_GLOBAL_ROPE))
    turning = part.get("partial_rotary_factor", float, 1.0)
    if not 0 < turning <= 1:
        raise part.refuse("The part of a head that rotates is out of range.", "partial_rotary_factor", "above 0, to 1")
    return RopeConfig(part.get("rope_theta", float), turning=turning)
