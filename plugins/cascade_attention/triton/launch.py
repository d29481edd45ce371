"""Launches the fused kernel: picks its tile and the splits of the context, and passes its arguments."""

# Triton has no types, and may be missing where a user's type checker follows these sources.
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import next_power_of_2 as power

from d2sd.plugins.cascade_attention.arguments import ChunkMask, PagedContext
from d2sd.plugins.cascade_attention.triton.kernel import cascade_attention_kernel, pack_mask_kernel
from d2sd.plugins.cascade_attention.triton.tiles import (
    MOST_SPLITS,
    MOST_TALL_SPLITS,
    TileConfig,
    choose_splits,
    padded,
    register_limit,
    resident,
    select_tile,
)

# Shape letters as in reference.py.


def chunk_variant(
    k_pages: Tensor, batch: int, rows: int, columns: int, heads: int, itemsize: int, window: int | None
) -> tuple[int, int]:
    """Rows of a tile and splits for B chunks, of at most `rows` rows each, over page tables [B, `columns`]: passes for
    which they are equal run the same kernel.
    """
    _, _, kv_heads, size = k_pages.shape[-4:]
    fp8 = k_pages.dtype == torch.float8_e4m3fn
    shape = Shape(power(rows), heads, kv_heads, size, itemsize, current_capability(), fp8, window is not None)
    splits = _splits(shape, batch, _slots(k_pages, shape.rows, columns, window), k_pages.device)
    tile, _ = _plan(shape, k_pages.shape[-3], splits)
    return tile.rows, splits


def _slots(k_pages: Tensor, rows: int, columns: int, window: int | None) -> int:
    """Most tokens of context that the rows of a tile see."""
    slots = columns * k_pages.shape[-3]
    return slots if window is None else min(slots, window + rows)


# What depends on shapes alone is computed for the first layer of a pass, and found again for the others.


class Shape(NamedTuple):
    """The shapes of a pass on which its tiles depend."""

    rows: int  # T; the bucket of the longest chunk
    heads: int
    kv_heads: int
    size: int
    itemsize: int  # of a number of the queries
    capability: int
    fp8: bool  # the pages
    bounded: bool  # rows do not see all of the context

    @classmethod
    def of(cls, q: Tensor, k: Tensor, context: PagedContext, mask: Tensor | ChunkMask, first: Tensor | None) -> Shape:
        rows, bounds = (power(max(mask.lengths)), mask.first) if isinstance(mask, ChunkMask) else (q.shape[1], first)
        sizes = q.shape[2], k.shape[2], q.shape[3], q.element_size()
        return cls(rows, *sizes, current_capability(), context.fp8, bounds is not None)

    @property
    def packed_rows(self) -> int:
        """Rows of the queries that share a K/V head."""
        return self.rows * self.heads // self.kv_heads

    def tile(self, splits: int) -> TileConfig:
        """The tile for so many splits."""
        types = {"fp8": self.fp8, "bounded": self.bounded}
        return select_tile(self.packed_rows, self.size, self.itemsize, self.capability, **types, splits=splits)


@cache
def _splits(shape: Shape, batch: int, slots: int, device: torch.device) -> int:
    processors = torch.cuda.get_device_properties(device).multi_processor_count

    def chosen(most: int) -> int:
        tile = shape.tile(most)
        programs = batch * shape.kv_heads * math.ceil(shape.packed_rows / tile.rows)
        blocks = resident(tile, shape.size, shape.itemsize, shape.capability, fp8=shape.fp8)
        return min(most, choose_splits(programs, slots, processors * blocks))

    splits = chosen(MOST_SPLITS)
    return splits if splits > MOST_TALL_SPLITS else chosen(MOST_TALL_SPLITS)


@cache
def _plan(shape: Shape, page_size: int, splits: int) -> tuple[TileConfig, dict[str, Any]]:
    """Tile, and compile-time constants and options of the launch."""
    tile, group = shape.tile(splits), shape.heads // shape.kv_heads
    fixed = constants(tile, shape.size, shape.kv_heads, group, page_size, fp8=shape.fp8)
    limit = register_limit(tile, shape.size, shape.itemsize, shape.capability, fp8=shape.fp8)
    return tile, fixed | {"SPLITS": splits, "num_warps": tile.warps, "maxnreg": limit}


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PagedContext,
    mask: Tensor | ChunkMask,
    *,
    splits: int | None = None,
    first: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    arrived: Callable[[], Tensor] | None = None,
) -> Tensor:
    """The kernel with keys cut into `splits` parts, a power of two up to 16; None: as shapes alone say.

    It never synchronizes with the host: a CUDA graph can capture it. Of an `AttnMask` come its words [B, T, ceil(T/32)]
    int32, its `first` and its `window`.

    `arrived` gives the counters that layers share, [at least the programs of a split] int32, of those that are done:
    zeros, and zeros again afterwards. Without, a call makes its own.
    """
    shape = Shape.of(q, k, context, mask, first)
    if splits is None:
        batch, columns = context.page_table.shape
        splits = _splits(shape, batch, _slots(context.k_pages, shape.rows, columns, window), q.device)
    assert splits in (1, 2, 4, 8, 16), "a word of `arrived` counts to 16, and each split merges as many rows"
    words, starts, bounds = (None, mask.starts, mask.first) if isinstance(mask, ChunkMask) else (mask, None, first)
    words, bounds = (None if part is None else part.contiguous() for part in (words, bounds))
    k_pages, v_pages, page_table = context.k_pages, context.v_pages, context.page_table
    assert k_pages.is_contiguous(), "`contiguous` would copy the whole pool"
    assert v_pages.is_contiguous()
    assert page_table.shape[1], "the first id of a page is read where there is no context, too"
    assert not q.requires_grad, "the kernel has no backward"
    tile, fixed = _plan(shape, k_pages.shape[1], splits)
    made = q.dtype if scale is None else torch.float8_e4m3fn
    if out is None:
        out = torch.empty(q.shape, dtype=made, device=q.device)
    assert out.is_contiguous()
    assert (out.shape, out.dtype) == (q.shape, made)
    grid = (math.ceil(shape.packed_rows / tile.rows), len(page_table) * shape.kv_heads, splits)
    partial, lse, counters = None, None, None
    if splits > 1:
        partial = torch.empty((splits, *q.shape), dtype=q.dtype, device=q.device)
        lse = torch.empty((splits, *q.shape[:3]), dtype=torch.float32, device=q.device)
        programs = grid[0] * grid[1]
        counters = arrived() if arrived else torch.zeros(programs, dtype=torch.int32, device=q.device)
        assert len(counters) >= programs
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        cascade_attention_kernel[grid](
            q.contiguous(), k.contiguous(), v.contiguous(), k_pages, v_pages,
            page_table.contiguous(), context.context_len.contiguous(), words, starts,
            bounds, None if sinks is None else sinks.contiguous(), context.k_scale, context.v_scale, out, scale,
            partial, lse, counters, shape.rows, page_table.shape[1], **fixed,
        )  # fmt: skip
    return out


def current_capability() -> int:
    """Compute capability that Triton compiles for, such as 90; 0 where there is none, as in the interpreter."""
    try:
        capability: int = triton.runtime.driver.active.get_current_target().arch
    except RuntimeError:
        return 0
    return capability


def pack_mask_bits(attn_mask: Tensor) -> Tensor:
    batch, rows, columns = attn_mask.shape
    words = torch.empty(batch, rows, -(-columns // 32), dtype=torch.int32, device=attn_mask.device)
    with torch.cuda.device_of(attn_mask):  # type: ignore[no-untyped-call]
        pack_mask_kernel[batch * rows, words.shape[2]](attn_mask, words, rows, *attn_mask.stride(), num_warps=1)
    return words


def constants(tile: TileConfig, size: int, kv_heads: int, group: int, page_size: int, *, fp8: bool) -> dict[str, Any]:
    """Compile-time constants of this kernel and of that of `exact`: D, Hkv, Hq / Hkv, Z and tile sizes."""
    return {
        "SCALE": size**-0.5 * math.log2(math.e),
        "HKV": kv_heads,
        "GROUP": group,
        "HEAD": size,
        "PADDED": padded(size),
        "PAGE": page_size,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "STAGES": tile.stages,
        "FP8": fp8,
        "WIDEN": triton.knobs.runtime.interpret,
    }
