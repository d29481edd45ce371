"""The layout of a pair head, d2sd's own: a DFlash body, the head's keys in dflash_config and three more tensors.

    projector_type: d2sd_pair · pair_rank · pair_top_k, candidates of a slot

    pair_head.predecessor_projection [R, E] · pair_head.successor_projection [R, E]
    pair_head.hidden_projection.weight [R, E]

The body was trained without the head: without these keys and tensors the checkpoint is a plain DFlash drafter.
"""

from __future__ import annotations

from functools import partial

from d2sd.convert.checkpoint.head_layout import HeadLayout, Places, sizes
from d2sd.modeling.drafters.head_configs import PairConfig

_KEYS = {"pair_rank": "rank", "pair_top_k": "candidates"}


def read_pair(places: Places) -> PairConfig:
    """Read the keys, all of which are required; raises `CheckpointError` naming file and key."""
    return PairConfig(**{ours: places.home(key).size(key) for key, ours in _KEYS.items()})


PAIR = HeadLayout(
    name="pair",
    config=PairConfig,
    architectures=(),
    speculators_type=None,
    mark="pair_rank",
    keys=frozenset(_KEYS),
    projector="d2sd_pair",
    read=read_pair,
    fields=partial(sizes, _KEYS),
    unquantized=("pair_head*",),
)
