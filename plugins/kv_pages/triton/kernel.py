"""The paged write in one launch: one program copies one row of one layer, keys and values.

Triton compiles this file's function; mypy does not know its types.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "places", "columns"])
def write_pages_kernel(
    k, v, k_pages, v_pages, page_table, positions, keep, path, k_scale, v_scale,
    row_stride, page_stride, rows, places, columns,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Grid (B·N, L). `row_stride`, `page_stride`: numbers from one layer to the next; WIDTH = Hkv·D, PADDED ≥ WIDTH."""
    place = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    request = place // places

    # Target slot: rows that are not kept, or past the page table, are not written.
    position = tl.load(positions + place).to(tl.int32)
    block = position // PAGE
    kept = (tl.load(keep + place) != 0) & (block < columns)
    page = tl.load(page_table + request * columns + block, mask=kept, other=0).to(tl.int64)

    # Source row.
    row = place % places if path is None else tl.load(path + place).to(tl.int64)
    lane = tl.arange(0, PADDED)
    mask = lane < tl.where(kept, WIDTH, 0)
    source = layer * row_stride + (request * rows + row) * WIDTH + lane
    target = layer * page_stride + (page * PAGE + position % PAGE) * WIDTH + lane
    new_k = tl.load(k + source, mask=mask, other=0.0)
    new_v = tl.load(v + source, mask=mask, other=0.0)
    if FP8:
        # IEEE division, or a tie would round to the other side than in the reference.
        new_k = tl.clamp(tl.div_rn(new_k.to(tl.float32), tl.load(k_scale + layer)), -448.0, 448.0)
        new_v = tl.clamp(tl.div_rn(new_v.to(tl.float32), tl.load(v_scale + layer)), -448.0, 448.0)
    tl.store(k_pages + target, new_k.to(k_pages.dtype.element_ty), mask=mask)
    tl.store(v_pages + target, new_v.to(v_pages.dtype.element_ty), mask=mask)
