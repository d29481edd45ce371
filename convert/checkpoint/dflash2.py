"""The layout of DFlash 2: a DFlash body with a candidate selector, and with convolutions in its layers.

    z-lab, incoai, SpecForge   the keys in dflash_config
    speculators                the keys at the top level

    candidate_selector.predecessor_codebook [V, R] · candidate_selector.successor_codebook [V, R]
    candidate_selector.hidden_projection.weight [R, E]
    layers.{i}.{attention_conv, mlp_conv}.base_kernel [2, τ, E] · .kernel_projection.weight [2·τ·E / group, E]

Codebooks have no `.weight` behind their names.
"""

from __future__ import annotations

from functools import partial

from d2sd.convert.checkpoint.head_layout import HeadLayout, Places, sizes
from d2sd.modeling.drafters.head_configs import SelectorConfig

_KEYS = {
    "selector_rank": "rank",
    "selector_top_k": "candidates",
    "conv_kernel_size": "taps",
    "conv_group_size": "group",
}


def read_selector(places: Places) -> SelectorConfig:
    """Read the keys, all of which are required; raises `CheckpointError` naming file and key."""
    config = SelectorConfig(**{ours: places.home(key).size(key) for key, ours in _KEYS.items()})
    home = places.home("conv_group_size")
    hidden = places.home("hidden_size").size("hidden_size")
    if hidden % config.group:
        raise home.refuse("The groups of channels do not divide the hidden size.", "conv_group_size", f"of {hidden}")
    return config


DFLASH2 = HeadLayout(
    name="DFlash 2",
    config=SelectorConfig,
    architectures=("DFlash2DraftModel", "DFlash2Speculator"),
    speculators_type="dflash2",
    mark="selector_rank",
    keys=frozenset(_KEYS),
    windows_ahead=True,
    read=read_selector,
    fields=partial(sizes, _KEYS),
    unquantized=("candidate_selector*", "*_conv*"),
)
