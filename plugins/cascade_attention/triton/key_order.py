"""`AttnMask.order`: the columns of the mask that a row sees, in their order. Triton compiles this file's function."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton.language as tl

from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels


@dependent_kernel(do_not_specialize=["rows", "request_stride", "row_stride", "column_stride"])
def key_order_kernel(
    attn_mask, order, rows, request_stride, row_stride, column_stride,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (B·T,); order [B, T, COLUMNS + 2] int32, PADDED ≥ COLUMNS a power of two; TILE rows are tried at a time."""
    wait_for_prior_kernels()
    line = tl.program_id(0).to(tl.int64)
    mine = (line % rows).to(tl.int32)
    column = tl.arange(0, PADDED)
    of_request = attn_mask + (line // rows) * request_stride
    at = column * column_stride
    seen = tl.load(of_request + mine.to(tl.int64) * row_stride + at, mask=column < COLUMNS, other=0).to(tl.int32)
    rank = tl.cumsum(seen, 0) - 1
    of_row = order + line * (COLUMNS + 2)
    tl.store(of_row + rank, column, mask=seen != 0)
    tl.store(of_row + COLUMNS + column * 0, rank + 1, mask=column == COLUMNS - 1)

    # The last row that sees, up to this row's last column, what this row sees.
    last = tl.max(tl.where(seen != 0, column, -1), 0)
    leader = mine
    for start in tl.range((mine + 1) // TILE * TILE, rows, TILE):
        other = start + tl.arange(0, TILE)
        known = (other < rows)[:, None] & (column <= last)[None, :]
        theirs = tl.load(of_request + other.to(tl.int64)[:, None] * row_stride + at[None, :], mask=known, other=0)
        unlike = tl.max((seen[None, :] != theirs.to(tl.int32)).to(tl.int32), 1)
        leader = tl.maximum(leader, tl.max(tl.where((unlike == 0) & (other < rows), other, -1), 0))
    tl.store(of_row + COLUMNS + 1, leader)
