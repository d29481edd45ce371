"""The canonical drafter, which every reader returns and every writer accepts.

`config` and `tensors` are the complete model: nothing else affects its outputs. `source` keeps the text of the original
config.json, which also has fields that d2sd does not model (auto_map, bos ids, the spelling of dtype, key order). A
writer of the same format reuses that text if it still describes the same `config`, so a round trip is byte-equal; a
writer of another format writes its own text with every field. Fields that are not modelled are therefore never merged
into a format they were not written for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from d2sd.modeling.config import DrafterConfig

Format = Literal["z-lab", "modelopt", "specforge", "speculators"]


@dataclass(frozen=True, slots=True)
class Source:
    """The directory that a canonical drafter was read from, and the text of its config."""

    format: Format
    folder: Path
    text: str  # config.json
    metadata: Mapping[str, str] | None  # of the safetensors header
    shared: frozenset[str] = frozenset()  # names of the target's tensors among the drafter's


@dataclass(frozen=True, slots=True)
class CanonicalDrafter:
    """A drafter of any format."""

    config: DrafterConfig
    tensors: Mapping[str, Tensor]  # `Drafter.state_dict()`, in the one dtype in which they are stored
    source: Source
    notes: tuple[str, ...] = ()  # for the user: what was dropped unchecked, reordered or declared

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["fc.weight"].dtype
