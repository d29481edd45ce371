"""Choices as calls of the compiled library: tensors on a CPU, arguments as of the specifications."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from ctypes import Structure, byref, c_long, c_void_p

import torch
from torch import Tensor

from d2sd.plugins.choice.reference import pool_size_of, ranked
from d2sd.plugins.cpu.library import address, functions
from d2sd.plugins.trees.reference.branches import mask_rejected
from d2sd.token_codes import NOT_FINITE


class Likeliest(Structure):
    """`struct likeliest`."""

    _fields_ = [
        *((name, c_long) for name in ("count", "size", "width")),
        *((name, c_void_p) for name in ("logits", "index", "logit", "total")),
    ]


def argmax(logits: Tensor) -> Tensor:
    """logits [..., V] fp32 -> [...]: the first of the largest; NaN counts as the largest."""
    rows = logits.contiguous()
    out = torch.empty(logits.shape[:-1], dtype=torch.long)
    functions().d2sd_argmax(address(rows), out.numel(), logits.shape[-1], address(out))
    return out


def choose(logits, context_len, depth, sampling):
    """Where no request is sampled."""
    chosen = argmax(logits.float())
    return chosen.where(logits.gather(-1, chosen[..., None])[..., 0].isfinite(), NOT_FINITE)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """`likeliest`; of equal logits the first comes first."""
    rows = logits.contiguous()
    shape = *logits.shape[:-1], count
    pool, index = torch.empty(shape), torch.empty(shape, dtype=torch.long)
    total = torch.empty(*logits.shape[:-1], 1)
    sizes = total.numel(), logits.shape[-1], count
    functions().d2sd_likeliest(
        byref(Likeliest(*sizes, *map(address, (rows, index, pool, total)))), torch.get_num_threads()
    )
    return pool, index, total


def candidates(logits, context_len, sampling, width, ids=None, branches=None):
    if branches is not None:
        logits = mask_rejected(branches, logits, ids)
    found = likeliest(logits.float(), pool_size_of(logits, sampling, width))
    return ranked(*found, context_len, sampling, width, ids)
