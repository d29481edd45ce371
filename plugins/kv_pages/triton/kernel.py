"""The paged write in one launch: one program copies one row of one layer, keys and values."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton.language as tl
from triton import next_power_of_2 as power

from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels
from d2sd.plugins.shared.kernels import in_fp8_range

# Shape letters as in reference.py.
# Nothing here waits for the device: a CUDA graph can capture it.

#: 128 threads of 8 elements: a row of 8 heads of 128.
WARPS = 4


@dependent_kernel(do_not_specialize=["rows", "places", "columns"])
def write_pages_kernel(
    k, v, k_pages, v_pages, page_table, positions, keep, path, k_scale, v_scale,
    row_stride, page_stride, rows, places, columns,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Grid (B·N, L). `row_stride`, `page_stride`: numbers from one layer to the next; WIDTH = Hkv·D, PADDED ≥ WIDTH."""
    wait_for_prior_kernels()
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
        new_k = in_fp8_range(new_k, tl.load(k_scale + layer))
        new_v = in_fp8_range(new_v, tl.load(v_scale + layer))
    tl.store(k_pages + target, new_k.to(k_pages.dtype.element_ty), mask=mask)
    tl.store(v_pages + target, new_v.to(v_pages.dtype.element_ty), mask=mask)


def write_pages(k, v, k_pages, v_pages, page_table, positions, keep, path=None, k_scale=None, v_scale=None):
    layers, _, rows, kv_heads, size = k.shape
    width = kv_heads * size
    fp8 = k_pages.dtype == torch.float8_e4m3fn
    assert k_pages.is_contiguous()
    assert v_pages.is_contiguous()
    assert fp8 == (k_scale is not None) == (v_scale is not None)
    # Layers may be strided, as a slice of longer rows is; k and v must have the same stride.
    if not (k[0].is_contiguous() and v[0].is_contiguous() and k.stride(0) == v.stride(0)):
        k, v = k.contiguous(), v.contiguous()
    with torch.cuda.device_of(k):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        write_pages_kernel[positions.numel(), layers](
            k, v, k_pages, v_pages,
            page_table.contiguous(), positions.contiguous(), keep.contiguous(),
            None if path is None else path.contiguous(), k_scale, v_scale,
            k.stride(0), k_pages.stride(0), rows, positions.shape[1], page_table.shape[1],
            WIDTH=width, PADDED=power(width), PAGE=k_pages.shape[2], FP8=fp8, num_warps=WARPS,
        )  # fmt: skip
