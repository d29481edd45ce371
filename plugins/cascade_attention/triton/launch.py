"""Launches the fused kernel: picks its tile and the splits of the context, and passes its arguments."""

# Triton has no types, and may be missing where a user's type checker follows these sources.
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

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


def cascade_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PagedContext,
    mask: Tensor | ChunkMask,
    *,
    first: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    arrived: Callable[[], Tensor] | None = None,
) -> Tensor:
    """`cascade_attention` on CUDA; a `mask` of words [B, T, ceil(T/32)] int32 is `AttnMask.words`, as is `first`.

    Never synchronizes with the host, and chooses tiles and splits by shapes alone: a CUDA graph can capture it.
    `arrived` gives the counters that the layers of a pass share (`AttnMask.arrived`); without, a call makes its own.
    """
    rows, columns = _rows(q, mask), context.page_table.shape[1]
    bounded = (mask.first if isinstance(mask, ChunkMask) else first) is not None
    shape = len(context.page_table), rows, *q.shape[2:], k.shape[2], q.element_size()
    slots = _slots(context.k_pages, rows, columns, window)
    splits = _splits(*shape, slots, q.device, current_capability(), fp8=context.fp8, bounded=bounded)
    counters = arrived() if arrived is not None and splits > 1 else None
    given = {"first": first, "sinks": sinks, "scale": scale, "out": out, "arrived": counters}
    return launch(q, k, v, context, mask, splits=splits, **given)


def chunk_variant(
    k_pages: Tensor, batch: int, rows: int, columns: int, heads: int, itemsize: int, window: int | None
) -> tuple[int, int]:
    """Rows of a tile and splits for B chunks, of at most `rows` rows each, over page tables [B, `columns`]: passes for
    which they are equal run the same kernel.
    """
    _, _, kv_heads, size = k_pages.shape[-4:]
    rows, fp8, bounded, capability = (
        power(rows),
        k_pages.dtype == torch.float8_e4m3fn,
        window is not None,
        current_capability(),
    )
    slots = _slots(k_pages, rows, columns, window)
    shape = batch, rows, heads, size, kv_heads, itemsize, slots, k_pages.device, capability
    splits = _splits(*shape, fp8=fp8, bounded=bounded)
    tile, _ = _plan(
        rows, heads, size, kv_heads, itemsize, k_pages.shape[-3], splits, capability, fp8=fp8, bounded=bounded
    )
    return tile.rows, splits


def _slots(k_pages: Tensor, rows: int, columns: int, window: int | None) -> int:
    """Most tokens of context that the rows of a tile see."""
    slots = columns * k_pages.shape[-3]
    return slots if window is None else min(slots, window + rows)


def _rows(q: Tensor, mask: Tensor | ChunkMask) -> int:
    """T; the bucket of the longest chunk."""
    return power(max(mask.lengths)) if isinstance(mask, ChunkMask) else q.shape[1]


# What depends on shapes alone is computed for the first layer of a pass, and found again for the others.


@cache
def _splits(
    batch: int,
    rows: int,
    heads: int,
    size: int,
    kv_heads: int,
    itemsize: int,
    slots: int,
    device: torch.device,
    capability: int,
    *,
    fp8: bool,
    bounded: bool,
) -> int:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    given = size, itemsize, capability

    def chosen(most: int) -> int:
        """With the tile for so many splits."""
        tile = select_tile(rows * heads // kv_heads, *given, fp8=fp8, bounded=bounded, splits=most)
        programs = batch * kv_heads * math.ceil(rows * heads / kv_heads / tile.rows)
        return min(most, choose_splits(programs, slots, processors * resident(tile, *given, fp8=fp8)))

    splits = chosen(MOST_SPLITS)
    return splits if splits > MOST_TALL_SPLITS else chosen(MOST_TALL_SPLITS)


@cache
def _plan(
    rows: int,
    heads: int,
    size: int,
    kv_heads: int,
    itemsize: int,
    page_size: int,
    splits: int,
    capability: int,
    *,
    fp8: bool,
    bounded: bool,
) -> tuple[TileConfig, dict[str, Any]]:
    """Tile, and compile-time constants and options of the launch."""
    group = heads // kv_heads
    tile = select_tile(rows * group, size, itemsize, capability, fp8=fp8, bounded=bounded, splits=splits)
    fixed = constants(tile, size, kv_heads, group, page_size, fp8=fp8)
    limit = register_limit(tile, size, itemsize, capability, fp8=fp8)
    return tile, fixed | {"SPLITS": splits, "num_warps": tile.warps, "maxnreg": limit}


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PagedContext,
    mask: Tensor | ChunkMask,
    *,
    splits: int,
    first: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """The kernel with keys cut into `splits` parts, a power of two up to 16.

    Of an `AttnMask` come its words and its `first`.

    `arrived` [at least the programs of a split] int32 counts those that are done: zeros, and zeros again afterwards.
    """
    assert splits in (1, 2, 4, 8, 16), "a word of `arrived` counts to 16, and each split merges as many rows"
    heads, size = q.shape[2:]
    rows, kv_heads = _rows(q, mask), k.shape[2]
    words, starts, bounds = (None, mask.starts, mask.first) if isinstance(mask, ChunkMask) else (mask, None, first)
    words, bounds = (None if part is None else part.contiguous() for part in (words, bounds))
    k_pages, v_pages, page_table = context.k_pages, context.v_pages, context.page_table
    assert k_pages.is_contiguous(), "`contiguous` would copy the whole pool"
    assert v_pages.is_contiguous()
    assert not q.requires_grad, "the kernel has no backward"
    shape = rows, heads, size, kv_heads, q.element_size(), k_pages.shape[1]
    tile, fixed = _plan(*shape, splits, current_capability(), fp8=context.fp8, bounded=bounds is not None)
    made = q.dtype if scale is None else torch.float8_e4m3fn
    if out is None:
        out = torch.empty(q.shape, dtype=made, device=q.device)
    assert out.is_contiguous()
    assert (out.shape, out.dtype) == (q.shape, made)
    grid = (math.ceil(rows * heads // kv_heads / tile.rows), len(page_table) * kv_heads, splits)
    partial, lse = None, None
    if splits > 1:
        partial = torch.empty((splits, *q.shape), dtype=q.dtype, device=q.device)
        lse = torch.empty((splits, *q.shape[:3]), dtype=torch.float32, device=q.device)
        arrived = torch.zeros(grid[0] * grid[1], dtype=torch.int32, device=q.device) if arrived is None else arrived
        assert len(arrived) >= grid[0] * grid[1]
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        cascade_attention_kernel[grid](
            q.contiguous(), k.contiguous(), v.contiguous(), k_pages, v_pages,
            page_table.contiguous(), context.context_len.contiguous(), words, starts,
            bounds, None if sinks is None else sinks.contiguous(), context.k_scale, context.v_scale, out, scale,
            partial, lse, arrived, rows, page_table.shape[1], **fixed,
        )  # fmt: skip
    return out


def current_capability() -> int:
    """Compute capability that Triton compiles for, such as 90; 0 where there is none, as in the interpreter."""
    try:
        capability: int = triton.runtime.driver.active.get_current_target().arch
    except RuntimeError:
        return 0
    return capability


def pack_mask_triton(attn_mask: Tensor) -> Tensor:
    """`pack_mask_bits` on CUDA."""
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
