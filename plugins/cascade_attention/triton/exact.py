"""Launches the kernels of `exact`, by shapes alone: nothing is read on the host, so a CUDA graph can capture all of it.

Products and sums are not fused to one rounding (`enable_fp_fusion`): the compiler would choose where, and might choose
differently in two loops that must agree.
"""

# Triton has no types, and may be missing where a user's type checker follows these sources.
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton import next_power_of_2 as power

from d2sd.plugins.cascade_attention.arguments import PagedContext
from d2sd.plugins.cascade_attention.triton.exact_kernel import attention_kernel, merge_splits_kernel
from d2sd.plugins.cascade_attention.triton.key_order import key_order_kernel
from d2sd.plugins.cascade_attention.triton.launch import constants, current_capability
from d2sd.plugins.cascade_attention.triton.tiles import TileConfig, padded

OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
#: Positions of a split. A plain step reads the keys and values of so many in about 10 us an SM; fewer splits of a long
#: context leave SMs idle, more write more partial results. Arithmetic: not yet timed.
SPAN = 1024
#: Rows of a mask that a program compares at a time with its own.
ROWS_TRIED = 32
#: Bytes of partial results, above which the rows of a pass are attended to in parts, one after the other.
MOST_PARTIAL = 2**29


def key_order(attn_mask: Tensor) -> Tensor:
    """`AttnMask.order` on CUDA."""
    batch, rows, columns = attn_mask.shape
    order = torch.empty(batch, rows, columns + 2, dtype=torch.int32, device=attn_mask.device)
    with torch.cuda.device_of(attn_mask):  # type: ignore[no-untyped-call]
        key_order_kernel[batch * rows,](
            attn_mask,
            order,
            rows,
            *attn_mask.stride(),
            COLUMNS=columns,
            PADDED=max(32, power(columns)),
            TILE=ROWS_TRIED,
            num_warps=4 if columns <= 256 else 8,
        )
    return order


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PagedContext,
    order: Tensor | None,
    bounds: Tensor | None = None,
    sinks: Tensor | None = None,
    most_partial: int = MOST_PARTIAL,
) -> Tensor:
    """The kernel for rows of trees, or, without `order`, for a prompt's chunk of each request.

    `bounds` [B, T] is `AttnMask.first`.
    """
    batch, rows, heads, size = q.shape
    slots = context.page_table.shape[1] * context.k_pages.shape[1]
    splits = triton.cdiv(slots + rows, SPAN)
    part = max(1, most_partial // (splits * batch * heads * size * 4)) if splits > 1 else rows
    if part >= rows:
        return _launch(q, k, v, context, order, bounds, sinks, 0, splits)
    parts = []
    for first, queries in zip(range(0, rows, part), torch.split(q, part, 1), strict=True):
        parts.append(_launch(queries, k, v, context, order, bounds, sinks, first, splits))
    return torch.cat(parts, 1)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PagedContext,
    order: Tensor | None,
    bounds: Tensor | None,
    sinks: Tensor | None,
    first: int,
    splits: int,
) -> Tensor:
    """Rows of q, from row `first` of the pass on."""
    batch, rows, heads, size = q.shape
    kv_heads, new = k.shape[2], k.shape[1]
    k_pages, page_table = context.k_pages, context.page_table
    assert k_pages.is_contiguous()
    assert context.v_pages.is_contiguous()
    assert page_table.shape[1], "the first id of a page is read where there is no context, too"
    tile = attention_tile(size, q.element_size(), current_capability(), fp8=context.fp8, bounded=bounds is not None)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    partial, lse = out, None
    if splits > 1:
        partial = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
        lse = torch.empty((splits, batch, rows, heads), dtype=torch.float32, device=q.device)
    order, bounds, sinks = (None if x is None else x.contiguous() for x in (order, bounds, sinks))
    grid = triton.cdiv(rows * heads // kv_heads, tile.rows), batch * kv_heads, splits
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        attention_kernel[grid](
            q.contiguous(), k.contiguous(), v.contiguous(), k_pages, context.v_pages, page_table.contiguous(),
            context.context_len.contiguous(), order, bounds, sinks, context.k_scale, context.v_scale, partial,
            lse, rows, new, first, page_table.shape[1],
            **attention_constants(
                tile, size, kv_heads, heads // kv_heads, k_pages.shape[1], split=splits > 1, fp8=context.fp8
            ),
            num_warps=tile.warps, **OPTIONS,
        )  # fmt: skip
        if lse is not None:
            merge_splits_kernel[batch * rows * heads,](
                partial, lse, out, splits, HEAD=size, PADDED=padded(size), num_warps=1, **OPTIONS
            )
    return out


def attention_tile(size: int, itemsize: int, capability: int, *, fp8: bool, bounded: bool) -> TileConfig:
    """One for any number of rows: another height or number of columns changes bits.

    Three stages are two tiles of keys and values: one is copied while the other is used. Where products are `mma.sync`,
    as on sm_89 and sm_120, 64 rows over FP8 pages run out of registers.
    """
    wide = padded(size)
    if itemsize == 4:
        return TileConfig(rows=16, columns=16, warps=4, stages=3)
    low = wide == 256 or (wide == 128 and fp8 and (bounded or capability // 10 in (8, 12)))
    many = (wide >= 128 and fp8) or (wide == 128 and bounded)
    return TileConfig(32 if low else 64, columns=16 if wide == 256 else 32, warps=8 if many else 4, stages=3)


@cache
def attention_constants(
    tile: TileConfig, size: int, kv_heads: int, group: int, page_size: int, *, split: bool, fp8: bool
) -> dict[str, Any]:
    """Compile-time constants of `attention_kernel`: D, Hkv, Hq / Hkv, Z."""
    return constants(tile, size, kv_heads, group, page_size, fp8=fp8) | {"SPLIT": split, "SPAN": SPAN}
