"""`AttnMask.order`: the columns of the mask that a row sees, in their order. Triton compiles this file's function."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "request_stride", "row_stride", "column_stride"])
def key_order_kernel(
    attn_mask, order, rows, request_stride, row_stride, column_stride, COLUMNS: tl.constexpr, PADDED: tl.constexpr
):
    """Grid (B·T,); order [B, T, COLUMNS + 1] int32, PADDED ≥ COLUMNS a power of two."""
    line = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    at = attn_mask + (line // rows) * request_stride + (line % rows) * row_stride + column * column_stride
    seen = tl.load(at, mask=column < COLUMNS, other=0).to(tl.int32)
    rank = tl.cumsum(seen, 0) - 1
    tl.store(order + line * (COLUMNS + 1) + rank, column, mask=seen != 0)
    tl.store(order + line * (COLUMNS + 1) + COLUMNS + column * 0, rank + 1, mask=column == COLUMNS - 1)
