"""The canonical drafter: what every reader returns and every writer takes.

`config` and `tensors` are the model, all of it: nothing else decides what it says. `source` is how its directory said
so: the text of its config.json, which also holds what we do not model (auto_map, bos ids, dtype's spelling, the order
of the keys). A writer of the same format writes that text again where it still says what `config` says, so a round
trip is byte-equal; a writer of another format writes its own, with every field. So foreign fields are carried as one
text, never merged into a format they were not written for.
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
    """Where a canonical drafter was read from, and how that said it."""

    format: Format
    folder: Path
    text: str  # config.json
    metadata: Mapping[str, str] | None  # of the safetensors header
    borrowed: frozenset[str] = frozenset()  # names of the target's tensors that stood among the drafter's


@dataclass(frozen=True, slots=True)
class CanonicalDrafter:
    """A drafter of any format."""

    config: DrafterConfig
    tensors: Mapping[str, Tensor]  # `Drafter.state_dict()`, in the one dtype in which they are stored
    source: Source
    notes: tuple[str, ...] = ()  # what the user must be told: what was dropped unchecked, reordered, declared

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["fc.weight"].dtype
