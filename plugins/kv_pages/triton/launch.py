"""Launches the paged write."""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins.kv_pages.triton.kernel import write_pages_kernel
from d2sd.plugins.shared.sizes import power

# Shape letters as in reference.py.

#: 128 threads of 8 elements: a row of 8 heads of 128.
WARPS = 4


def write_pages_triton(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    keep: Tensor,
    path: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`write_pages`, same arguments, on CUDA. Never synchronizes with the host: a CUDA graph can capture it."""
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
