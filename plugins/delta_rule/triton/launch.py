"""Launches the kernels, by the arguments of the ops. Shapes alone decide how, and nothing is read on the host: a CUDA
graph can capture it.
"""

# Triton has no types, and may be missing where a user's type checker follows these sources.
# mypy: disable-error-code="no-untyped-def,import-untyped,import-not-found"

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton import next_power_of_2 as power

from d2sd.plugins.cascade_attention import AttnMask, ChunkMask
from d2sd.plugins.delta_rule.triton.closed_form import chunk_rule_kernel, tree_rule_kernel
from d2sd.plugins.delta_rule.triton.convolution import convolution_kernel, keep_inputs_kernel
from d2sd.plugins.delta_rule.triton.recurrence import recurrence_kernel
from d2sd.plugins.delta_rule.types import DeltaRows

# Shape letters as in d2sd/plugins/delta_rule/__init__.py.

INTERPRET = triton.knobs.runtime.interpret
#: Columns of a state in one program of the recurrence, and its warps. 32 heads of 128 give 128 programs to a request.
COLUMNS, WARPS = 32, 4
#: Channels of one program, and its warps: eight bf16 numbers a thread.
CHANNELS, CHANNEL_WARPS = 1024, 4
#: The recurrence's steps round the same in every loop that they are compiled in.
UNFUSED: dict[str, Any] = {"enable_fp_fusion": False}


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of the closed form."""

    rows: int
    columns: int  # of the state
    warps: int

    def parts(self, size: int) -> int:
        """Programs of a head of Dv columns."""
        return size // min(self.columns, size)

    def constants(self, q: Tensor, rows: DeltaRows) -> dict[str, int]:
        """Compile-time constants of the kernels, and warps."""
        heads = rule_constants(q.shape[2], rows.v.shape[2], q.shape[3], rows.v.shape[3], self.columns)
        return {**heads, "TILE": self.rows, "BK": min(KEY_COLUMNS, q.shape[3]), "num_warps": self.warps}


#: Columns of keys that are multiplied at once.
KEY_COLUMNS = 32
#: For one tile, and for several in turn; more columns or warps spill. Tiles of 64 rows would be products of a warpgroup
#: (wgmma), before which Triton 3.7.1 leaves out a fence here: executed as PTX, they read sums that are not ready.
SMALL, MANY = Tile(32, 32, 4), Tile(32, 16, 4)


def tile_of(rows: int) -> Tile:
    """The tile for trees of so many rows."""
    padded: int = power(rows)
    return MANY if rows > SMALL.rows else replace(SMALL, rows=max(16, padded))


def tree_delta_rule(q, rows, states, slots, attn_mask, *, exact=False):
    mask = AttnMask(attn_mask) if isinstance(attn_mask, Tensor) else attn_mask
    if exact:
        return _exact(q, rows, states, slots, mask)
    batch, count, heads, size = rows.v.shape
    tile = tile_of(count)
    out = torch.empty(rows.v.shape, dtype=rows.v.dtype, device=q.device)
    changes = sums = None
    if count > tile.rows:
        changes = torch.empty(rows.v.shape, dtype=torch.float32, device=q.device)
        sums = torch.empty(2, tile.parts(size), batch, count, heads, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        tree_rule_kernel[heads * tile.parts(size), batch](
            *_given(q, rows), states, slots.contiguous(), mask.words, out, changes, sums, count,
            **tile.constants(q, rows), MANY=count > tile.rows, WIDEN=INTERPRET,
        )  # fmt: skip
    return out


def chunk_delta_rule(q, rows, states, slots, chunks, *, exact=False):
    if exact:
        return _exact(q, rows, states, slots, chunks)
    heads, size = rows.v.shape[2:]
    tile = tile_of(min(max(chunks.lengths), SMALL.rows))
    out = torch.empty(rows.v.shape, dtype=rows.v.dtype, device=q.device)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        chunk_rule_kernel[heads * tile.parts(size), len(slots)](
            *_given(q, rows), states, slots.contiguous(), chunks.starts, out,
            **tile.constants(q, rows), WIDEN=INTERPRET,
        )  # fmt: skip
    return out


def _exact(q: Tensor, rows: DeltaRows, states: Tensor, slots: Tensor, mask: AttnMask | ChunkMask) -> Tensor:
    batch, count = q.shape[:2]
    out = torch.empty(rows.v.shape, dtype=rows.v.dtype, device=q.device)
    if isinstance(mask, ChunkMask):
        _recur(q, rows, states, slots, (None, None, None, mask.starts, out), count, len(slots))
    else:
        _recur(q, rows, states, slots, (None, None, mask.order, None, out), count, batch * count)
    return out


def commit_delta_rule(rows, states, slots, path, count):
    lists = path.contiguous(), count.contiguous(), None, None, None
    _recur(None, rows, states, slots, lists, rows.k.shape[2], len(slots), path.shape[1], *states.shape[:2])


def _recur(
    q: Tensor | None,
    rows: DeltaRows,
    states: Tensor,
    slots: Tensor,
    lists: tuple[Tensor | None, ...],
    count: int,
    programs: int,
    width: int = 0,
    layers: int = 1,
    pool: int = 0,
) -> None:
    """`lists`: the kernel's path, count, order, starts and out."""
    constants = rule_constants(rows.k.shape[-2], rows.v.shape[-2], rows.k.shape[-1], rows.v.shape[-1], COLUMNS)
    assert states.is_contiguous()
    with torch.cuda.device_of(rows.k):  # type: ignore[no-untyped-call]
        recurrence_kernel[constants["HV"] * constants["DV"] // constants["BV"], programs, layers](
            *_given(q, rows),
            states,
            slots.contiguous(),
            *lists,
            count,
            width,
            pool,
            **constants,
            num_warps=WARPS,
            **UNFUSED,
        )


def _given(q: Tensor | None, rows: DeltaRows) -> tuple[Tensor | None, ...]:
    """The arguments q, k, v, g and beta."""
    tensors = (q, rows.k, rows.v, rows.g, rows.beta)
    return tuple(None if x is None else x.contiguous() for x in tensors)


@cache
def rule_constants(key_heads: int, heads: int, key_size: int, size: int, columns: int) -> dict[str, int]:
    """Compile-time constants of the kernels of the rule: Hk, Hv, Dk, Dv and the columns of a program."""
    return {"HK": key_heads, "HV": heads, "DK": key_size, "DV": size, "BV": min(columns, size)}


def convolution(x, weight, states, slots, mask, bias=None, *, silu=True):
    chunks, mask = isinstance(mask, ChunkMask), AttnMask(mask) if isinstance(mask, Tensor) else mask
    rows, words, starts = (max(mask.lengths), None, mask.starts) if chunks else (x.shape[1], mask.words, None)
    out, block = torch.empty_like(x, memory_format=torch.contiguous_format), min(CHANNELS, power(x.shape[2]))
    assert states.is_contiguous()
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        convolution_kernel[triton.cdiv(x.shape[2], block), rows, len(slots)](
            x.contiguous(), weight.contiguous(), bias, states, slots.contiguous(), words, starts, out, rows,
            CHANNELS=x.shape[2], TAPS=weight.shape[1], BLOCK=block, PADDED=1 if chunks else power(rows),
            SILU=silu, num_warps=CHANNEL_WARPS,
        )  # fmt: skip
    return out


def commit_convolution(x, states, slots, path, count):
    """`x` may be strided by layer and request."""
    if not x[0, 0].is_contiguous():
        x = x.contiguous()
    layers, batch, _, channels = x.shape
    block = min(CHANNELS, power(channels))
    assert states.is_contiguous()
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        keep_inputs_kernel[triton.cdiv(channels, block), batch, layers](
            x, states, slots.contiguous(), path.contiguous(), count.contiguous(),
            path.shape[1], states.shape[1], x.stride(0), x.stride(1),
            CHANNELS=channels, TAPS=states.shape[3] + 1, BLOCK=block,
            num_warps=max(1, CHANNEL_WARPS * block // CHANNELS),  # a channel in two would be read and written at once
        )  # fmt: skip
