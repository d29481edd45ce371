"""Launches the fused kernel: picks its tile and the splits of the context, and passes its arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from d2sd.plugins.cascade_attention.context import PagedContext
from d2sd.plugins.cascade_attention.triton.kernel import cascade_attention_kernel, merge_kernel
from d2sd.plugins.cascade_attention.triton.tiles import TileConfig, choose_splits, padded, select_tile

# Shape letters as in reference.py.


def cascade_attention_triton(q: Tensor, k: Tensor, v: Tensor, context: PagedContext, mask_words: Tensor) -> Tensor:
    """`cascade_attention` on CUDA; `mask_words` [B, T, ceil(T/32)] int32 is `AttnMask.words`.

    Never synchronizes with the host, and chooses tiles and splits by shapes alone: a CUDA graph can capture it.
    """
    batch, rows, heads, size = q.shape
    kv_heads = k.shape[2]
    tile = select_tile(rows * heads // kv_heads, size, q.element_size(), fp8=context.fp8)
    programs = batch * kv_heads * math.ceil(rows * heads / kv_heads / tile.rows)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    splits = choose_splits(programs, context.page_table.shape[1] * context.k_pages.shape[1], processors)
    return launch(q, k, v, context, mask_words, splits=splits)


def launch(q: Tensor, k: Tensor, v: Tensor, context: PagedContext, mask_words: Tensor, *, splits: int) -> Tensor:
    """The kernel with the context cut into `splits` parts, and the merge kernel where there are several."""
    batch, rows, heads, size = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    k_pages, v_pages, page_table = context.k_pages, context.v_pages, context.page_table
    assert k_pages.is_contiguous(), "`contiguous` would copy the whole pool"
    assert v_pages.is_contiguous()
    assert not q.requires_grad, "the kernel has no backward"
    tile = select_tile(rows * group, size, q.element_size(), fp8=context.fp8)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    partial, lse = out, None
    if splits > 1:
        partial = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
        lse = torch.empty((splits, batch, rows, heads), dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(rows * group, tile.rows), batch * kv_heads, splits)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        cascade_attention_kernel[grid](
            q.contiguous(), k.contiguous(), v.contiguous(), k_pages, v_pages,
            page_table.contiguous(), context.context_len.contiguous(), mask_words.contiguous(),
            context.k_scale, context.v_scale, partial, lse, rows, page_table.shape[1],
            **constants(tile, size, kv_heads, group, k_pages.shape[1], splits, fp8=context.fp8), num_warps=tile.warps,
        )  # fmt: skip
        if lse is not None:
            merge_kernel[batch * rows * heads,](partial, lse, out, **merge_constants(size, splits), num_warps=1)
    return out


def constants(
    tile: TileConfig, size: int, kv_heads: int, group: int, page_size: int, splits: int, *, fp8: bool
) -> dict[str, Any]:
    """Compile-time constants of the kernel: D, Hkv, Hq / Hkv, Z, tile sizes and splits."""
    return {
        "SCALE": size**-0.5 * math.log2(math.e), "HKV": kv_heads, "GROUP": group, "HEAD": size, "PADDED": padded(size),
        "PAGE": page_size, "SPLITS": splits, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_T": tile.new,
        "STAGES": tile.stages, "FP8": fp8, "WIDEN": triton.knobs.runtime.interpret,
    }  # fmt: skip


def merge_constants(size: int, splits: int) -> dict[str, int]:
    """Compile-time constants of the merge kernel."""
    return {
        "HEAD": size, "PADDED": padded(size), "SPLITS": splits, "PADDED_SPLITS": triton.next_power_of_2(splits)
    }  # fmt: skip
