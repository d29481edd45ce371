"""The layout of DSpine, as SpecForge writes it: a DFlash body of causal layers that pass on what slots predict.

    dspine_config     transfer_rank, message_size and top_k, at the top level; its other keys concern training alone

    injection.readouts.{i}.weight [R, E] · injection.writes.{i}.weight [E, C], of each layer; C: message_size
    injection.{message, receiver_gate, predecessor_gate}.weight [C, R] · injection.bias [C]
    transfer_codes [V, R], often in fp32 · transfer_ready [], that the codes are there

SpecForge trains every layer without a window as a causal one, whatever is_causal says. `transfer_ready` is not kept,
and written keys are in dflash_config: SpecForge's own code does not read what is written here.
"""

from __future__ import annotations

from d2sd.convert.checkpoint.head_layout import HeadLayout, Places, sizes
from d2sd.modeling.drafters.head_configs import InjectionConfig

_KEY = "dspine_config"
_KEYS = {"transfer_rank": "rank", "message_size": "message", "top_k": "candidates"}
_TRAINING = {
    "ce_weight", "alignment_weight", "alignment_warmup_steps", "replacement_layers", "replacement_probability",
    "replacement_hold_ratio", "replacement_end_ratio", "candidate_mass_threshold",
}  # fmt: skip


def read_injection(places: Places) -> InjectionConfig:
    """Read the keys, of which the sizes are required; raises `CheckpointError` naming file and key."""
    part = places.home(_KEY).part(_KEY)
    if unknown := sorted(part.values.keys() - _KEYS.keys() - _TRAINING):
        raise part.refuse("A drafter's config key is unknown, and may change its meaning.", unknown[0], "no such key")
    for key in ("is_causal", "causal", "causal_head"):
        places.home(key).only(key, None, True)
    return InjectionConfig(**{ours: part.size(key) for key, ours in _KEYS.items()})


DSPINE = HeadLayout(
    name="DSpine",
    config=InjectionConfig,
    architectures=("DSpineDraftModel",),
    speculators_type=None,
    mark=_KEY,
    keys=frozenset({_KEY}),
    causal=True,
    read=read_injection,
    fields=lambda config: {_KEY: sizes(_KEYS, config)},
    unquantized=("injection*",),
    loose={"transfer_codes": "injection.transfer_codes", "transfer_ready": None},
)
