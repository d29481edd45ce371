"""A kind of head in checkpoints: one record for all that readers and writers of drafters do with it.

The kinds are in `heads.py`; every other difference between two drafters of the DFlash layout is one of keys, which
`dflash.py` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.modeling.drafters.head_configs import HeadConfig


class Places:
    """The parts of a config.json in which a drafter's key may be: refused where two have it, and differ."""

    def __init__(self, *parts: HFConfig) -> None:
        self._parts = parts

    def home(self, key: str) -> HFConfig:
        """The part that has a value of `key`; the first if none has."""
        having = [part for part in self._parts if part.values.get(key) is not None]
        for other in having[1:]:
            if other.values[key] != having[0].values[key]:
                raise other.refuse(f"{key} is given twice, with different values.", key, having[0].values[key])
        return having[0] if having else self._parts[0]

    def value(self, key: str) -> Any:
        """The value of `key`, None where it is missing."""
        return self.home(key).values.get(key)


def sizes(keys: Mapping[str, str], config: HeadConfig) -> dict[str, object]:
    """The keys of a head whose keys are fields of its config under other names."""
    return {key: getattr(config, ours) for key, ours in keys.items()}


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """A kind of head: its fields are what differs from kind to kind."""

    name: str
    config: type[HeadConfig]
    #: The name of the architecture that is written, then others that are read; none: they have a plain drafter's.
    architectures: tuple[str, ...]
    #: `speculators_model_type` of checkpoints in the format of speculators; None: it has no such drafters.
    speculators_type: str | None
    #: The key whose value is a size of such a head; drafters without one have None or 0.
    mark: str
    #: All its keys: in `dflash_config`, at the top level, or in both if they agree. Some concern training alone.
    keys: frozenset[str]
    #: Reads the keys; raises `CheckpointError` naming file and key.
    read: Callable[[Places], HeadConfig]
    #: Its keys in `dflash_config` as they are written, and in the format of speculators.
    fields: Callable[[Any], dict[str, object]]
    #: Patterns of its modules, which checkpoints hold in 16 bits.
    unquantized: tuple[str, ...]
    #: `projector_type` of such drafters; None: they have no such key.
    projector: str | None = None
    #: Whether the anchor's row proposes, where a config does not say.
    sample_from_anchor: bool = False
    #: Whether layers with a window see what is behind a row in its block, where a config of speculators does not say.
    windows_ahead: bool = False
    #: Whether all layers are causal, where a config does not say.
    causal: bool = False
    #: Beginnings of tensors' names as others write them -> as ours.
    renamed: Mapping[str, str] = field(default_factory=dict)
    #: Tensors that may have a type of their own, by names as they are written -> as ours; None: they are not read.
    loose: Mapping[str, str | None] = field(default_factory=dict)
    #: Tensors with a row for each token: of our module over all of the target's, in speculators' over those it drafts.
    token_rows: tuple[str, ...] = ()
