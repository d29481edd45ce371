"""Conventions for a drafter's target layer ids. All conversions between them are in this file.

    convention          id i means                            formats
    output_of_layer     output of layer i, hidden_states[i+1] z-lab, ModelOpt, SpecForge; `DrafterConfig`
    hidden_states       hidden_states[i]; 0 is the embedding  speculators

A drafter read with the wrong convention runs, and is accepted slightly less: only the format determines the convention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Convention = Literal["output_of_layer", "hidden_states"]
#: What is added to the output-of-layer id.
_OFFSET: dict[Convention, int] = {"output_of_layer": 0, "hidden_states": 1}


def from_convention(ids: Sequence[int], convention: Convention) -> tuple[int, ...]:
    """Ids of a file -> ids of `DrafterConfig`."""
    return tuple(i - _OFFSET[convention] for i in ids)


def to_convention(ids: Sequence[int], convention: Convention) -> list[int]:
    """Ids of `DrafterConfig` -> ids of a file."""
    return [i + _OFFSET[convention] for i in ids]


def fault(ids: Sequence[int], num_target_layers: int) -> str | None:
    """Describe valid ids if these ids of `DrafterConfig` are invalid; None if they are valid, in any order."""
    if ids and len(set(ids)) == len(ids) and min(ids) >= 0 and max(ids) < num_target_layers:
        return None
    return f"ids of different layers, 0 to {num_target_layers - 1}"


def usual_ids(num_layers: int, num_target_layers: int) -> list[int]:
    """Defaults of z-lab and SGLang for a config without ids: evenly spaced from layer 1 to L - 3.

    Only for messages: a drafter trained with other ids would run with these and almost never be accepted.
    """
    if num_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 3 - 1) / (num_layers - 1)
    return [round(1 + index * step) for index in range(num_layers)]


def sort_columns(fc: Tensor, ids: Sequence[int]) -> Tensor:
    """fc [E, n·E], whose n column blocks follow `ids`, with the blocks in ascending order of the ids."""
    order = sorted(range(len(ids)), key=lambda index: ids[index])
    blocks = fc.chunk(len(ids), dim=1)
    return torch.cat([blocks[index] for index in order], dim=1)
