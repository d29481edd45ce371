"""Launching the fused kernel: which sizes it takes, how it is cut, what it is given."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from d2sd.plugins.cascade_attention.triton.kernel import cascade_attention_kernel, merge_kernel
from d2sd.plugins.cascade_attention.triton.tiles import TileConfig, choose_splits, padded, select_tile

# Shape letters as in op.py.


def fused_cascade_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    context_len: Tensor,
    packed_visible: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`cascade_attention` on CUDA; `packed_visible` [B, T, ceil(T/32)] int32 is `pack_mask_bits` of its mask.

    Reads nothing back to the host and chooses by shapes alone: a CUDA graph can hold it.
    """
    batch, rows, heads, size = q.shape
    kv_heads = k.shape[2]
    fp8 = k_pages.dtype == torch.float8_e4m3fn
    blocks = select_tile(rows * heads // kv_heads, size, q.element_size(), fp8=fp8)
    programs = batch * kv_heads * math.ceil(rows * heads / kv_heads / blocks.rows)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    splits = choose_splits(programs, page_table.shape[1] * k_pages.shape[1], processors)
    return launch(
        q, k, v, k_pages, v_pages, page_table, context_len, packed_visible, k_scale, v_scale, splits=splits
    )  # fmt: skip


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    context_len: Tensor,
    packed_visible: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    splits: int,
) -> Tensor:
    """The kernel with the context cut into `splits` parts, and the merge where there are several."""
    batch, rows, heads, size = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    assert k_pages.is_contiguous()  # a copy of a pool would be too dear to go unseen
    assert v_pages.is_contiguous()
    fp8 = k_pages.dtype == torch.float8_e4m3fn
    assert not fp8 or (k_scale is not None and v_scale is not None)
    assert not q.requires_grad, "the kernel has no backward"
    blocks = select_tile(rows * group, size, q.element_size(), fp8=fp8)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    partial, lse = out, None
    if splits > 1:
        partial = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
        lse = torch.empty((splits, batch, rows, heads), dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(rows * group, blocks.rows), batch * kv_heads, splits)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        cascade_attention_kernel[grid](
            q.contiguous(), k.contiguous(), v.contiguous(), k_pages, v_pages,
            page_table.contiguous(), context_len.contiguous(), packed_visible.contiguous(),
            k_scale if fp8 else None, v_scale if fp8 else None, partial, lse, rows, page_table.shape[1],
            **constants(blocks, size, kv_heads, group, k_pages.shape[1], splits, fp8=fp8), num_warps=blocks.warps,
        )  # fmt: skip
        if lse is not None:
            merge_kernel[batch * rows * heads,](partial, lse, out, **merge_constants(size, splits), num_warps=1)
    return out


def constants(
    blocks: TileConfig, size: int, kv_heads: int, group: int, page_size: int, splits: int, *, fp8: bool
) -> dict[str, Any]:
    """What the kernel is compiled for: D, Hkv, Hq / Hkv, Z, and how it is cut."""
    return {
        "SCALE": size**-0.5 * math.log2(math.e), "HKV": kv_heads, "GROUP": group, "HEAD": size, "PADDED": padded(size),
        "PAGE": page_size, "SPLITS": splits, "BLOCK_M": blocks.rows, "BLOCK_N": blocks.columns, "BLOCK_T": blocks.new,
        "STAGES": blocks.stages, "FP8": fp8, "WIDEN": triton.knobs.runtime.interpret,
    }  # fmt: skip


def merge_constants(size: int, splits: int) -> dict[str, int]:
    """The same of the merge."""
    return {
        "HEAD": size, "PADDED": padded(size), "SPLITS": splits, "PADDED_SPLITS": triton.next_power_of_2(splits)
    }  # fmt: skip
