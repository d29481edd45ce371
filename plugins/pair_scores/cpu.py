"""Scores of pairs as a call of the compiled library: tensors on a CPU, arguments as of the specification."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from ctypes import Structure, byref, c_long, c_void_p

import torch

from d2sd.plugins.cpu.library import TYPES, address, functions
from d2sd.plugins.trees.types import Draft


class Pairs(Structure):
    """`struct pairs`."""

    _fields_ = [
        *((name, c_long) for name in ("blocks", "slots", "size", "width", "rank", "length")),
        *((name, c_long) for name in ("each", "before_type", "behind_type", "slot_type", "mask")),
        *((name, c_void_p) for name in ("tokens", "shown", "logprob", "temperature")),
        *((name, c_void_p) for name in ("before", "behind", "of_slot", "best", "best_logprob", "best_table")),
    ]


def conditioned(blocks, draft, factors, mask_token_id, temperature, width, arrived=None):
    *lead, slots, size = draft.tokens.shape
    count, most, rank = blocks[..., 0].numel(), min(width, size), factors.behind.shape[-1]
    hot = temperature.float().repeat_interleave(count // len(temperature))
    tensors = draft.tokens.long(), blocks.long(), draft.logprob.float(), hot, factors.before, factors.behind
    inputs = [tensor.contiguous() for tensor in tensors]
    slot = None if factors.of_slot is None else factors.of_slot.contiguous()
    best = torch.empty(*lead, slots, most, dtype=torch.long), torch.empty(*lead, slots, most)
    table = None if width == 1 else torch.empty(*lead, slots, 1 + most, most)
    types = [0 if part is None else TYPES[part.dtype] for part in (factors.before, factors.behind, slot)]
    sizes = count, slots, size, most, rank, blocks.shape[-1], factors.before.dim() > 2, *types, mask_token_id
    pointers = map(address, (*inputs, slot, *best, table))
    functions().d2sd_condition(byref(Pairs(*sizes, *pointers)), torch.get_num_threads())
    return Draft(*best, table)
