"""LFM2: what the keys of its config.json mean, and the names of its tensors.

Layers are attention or gated short convolutions (`d2sd.modeling.mixers.short_conv`), around MLPs and norms that are
Llama's under other names.
"""

from __future__ import annotations

import re
from dataclasses import replace

from d2sd.convert.checkpoint.experts import expert_counts
from d2sd.convert.checkpoint.hf_config import MAX_SIZE, HFConfig
from d2sd.modeling.config import BodyConfig, ExpertsConfig
from d2sd.modeling.mixers.configs import ShortConvConfig

_CONVOLUTION, _FULL = "conv", "full_attention"
#: Names of its modules -> Llama's.
NAMES = {
    "embedding_norm": "norm",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "self_attn.out_proj": "self_attn.o_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
}
_NAME = re.compile(rf"(?<=\.)({'|'.join(map(re.escape, NAMES))})(?=\.)")


def lfm2(config: HFConfig, body: BodyConfig) -> BodyConfig:
    """The geometry that LFM2 writes with keys of its own."""
    for key in ("tie_embedding", "block_use_swiglu", "use_pos_enc"):
        config.only(key, True, None)
    types = config.layer_types(_types(config, body.num_layers), _CONVOLUTION, _FULL, both=True)
    return replace(
        body,
        intermediate_size=_width(config),
        qk_norm=True,
        recurrent=ShortConvConfig(
            layers=tuple(layer for layer, kind in enumerate(types) if kind == _CONVOLUTION),
            channels=body.hidden_size,
            taps=config.size("conv_L_cache", 3, limit=64),
            bias=config.get("conv_bias", bool, False),
        ),
    )


def lfm2_moe(config: HFConfig, body: BodyConfig) -> BodyConfig:
    """LFM2 with experts in all layers but the first few."""
    config.only("use_expert_bias", True, None)
    config.only("routed_scaling_factor", 1.0, 1, None)
    dense = config.get("num_dense_layers", int, 2)
    if not 0 <= dense <= body.num_layers:
        raise config.refuse("A number of layers is out of range.", "num_dense_layers", f"0 to {body.num_layers}")
    experts = ExpertsConfig(
        *expert_counts(config),
        intermediate_size=config.size("moe_intermediate_size"),
        normalized=config.get("norm_topk_prob", bool, True),
        dense_layers=tuple(range(dense)),
        sigmoid=True,
    )
    return replace(lfm2(config, body), intermediate_size=config.size("intermediate_size"), experts=experts)


def llama_name(name: str) -> str:
    """The name that a tensor has in Llama's layers."""
    return _NAME.sub(lambda found: NAMES[found[1]], name)


def _types(config: HFConfig, layers: int) -> list[str]:
    """Kinds of the layers by the numbers of those that attend, as older configs have them."""
    attending = config.integers("full_attn_idxs") if config.values.get("full_attn_idxs") is not None else range(layers)
    return [_FULL if layer in attending else _CONVOLUTION for layer in range(layers)]


def _width(config: HFConfig) -> int:
    """Width of the MLPs: as written, or two thirds of it, scaled, and rounded up to a multiple."""
    width = config.size("block_ff_dim" if config.values.get("block_ff_dim") is not None else "intermediate_size")
    if not config.get("block_auto_adjust_ff_dim", bool, True):
        return width
    scale, multiple = None, config.size("block_multiple_of", 256)
    if config.values.get("block_ffn_dim_multiplier") is not None:
        scale = config.get("block_ffn_dim_multiplier", float)
    scaled = int(2 * width / 3) * (1.0 if scale is None else scale)
    if not 1 <= scaled <= MAX_SIZE:  # an infinite one too, and NaN
        raise config.refuse("A size is out of range.", "block_ffn_dim_multiplier", f"a width of 1 to {MAX_SIZE}")
    return int(scaled) if scale is None else multiple * -(-int(scaled) // multiple)
