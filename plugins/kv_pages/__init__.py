"""The paged K/V write: `reference.py` is the specification, `triton/` the kernel; the CPU has the compiled library.

`write_pages` picks the implementation by the rules of `d2sd.plugins.dispatch`.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_long, c_void_p

import torch
from torch import Tensor

from d2sd.plugins import dispatch
from d2sd.plugins.cpu.library import address, functions
from d2sd.plugins.dispatch import Implementation
from d2sd.plugins.kv_pages.reference import write_pages_reference

__all__ = ["write_pages"]

OP = "the paged K/V write"


def write_pages(
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
    """Write K/V of rows into the pages of all layers, in place.

    Args:
        k, v: [L, B, T, Hkv, D].
        k_pages, v_pages: [L, P, Z, Hkv, D], contiguous, in any type; FP8 (E4M3) pages need the scales.
        page_table: [B, M].
        positions: [B, N], the token that each written row is. No two kept ones of a call are the same token.
        keep: [B, N] bool. No row is written where it is false or past the page table; page 0, the scratch page,
            may hold anything afterwards.
        path: [B, N] in [0, T), the row of k and v to write at each position; None: row n at position n, and N = T.
        k_scale, v_scale: [L] fp32.

    Raises:
        D2SDError: the pages are on a CUDA device whose kernel does not take them, under `D2SD_NO_FALLBACK=1`.
    """
    picked = dispatch.pick(OP, k_pages, pages=True, library=supported(k, v, k_pages))
    write = write_pages_cpu if picked is Implementation.LIBRARY else write_pages_reference
    if picked is Implementation.TRITON:
        from d2sd.plugins.kv_pages.triton.kernel import write_pages_triton

        write = write_pages_triton
    write(k, v, k_pages, v_pages, page_table, positions, keep, path, k_scale, v_scale)


class Commit(Structure):
    """`struct commit`."""

    _fields_ = [
        *((name, c_long) for name in ("layers", "batch", "count", "bytes")),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_strides", c_long * 3),
        ("v_strides", c_long * 3),
        ("k_pages", c_void_p),
        ("v_pages", c_void_p),
        *((name, c_long) for name in ("pages", "page_size", "table_width")),
        *((name, c_void_p) for name in ("table", "positions", "path", "keep")),
    ]


def supported(k: Tensor, v: Tensor, k_pages: Tensor) -> bool:
    """Whether the library writes rows k, v [L, B, T, Hkv, D] of these types and strides: it copies bytes."""
    size = k.shape[-1]
    return all(new.dtype == k_pages.dtype and new.stride()[3:] == (size, 1) for new in (k, v))


def write_pages_cpu(
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
    """`write_pages` for what is `supported`; FP8 pages are not, so the scales are unused."""
    layers, batch, _, heads, size = k.shape
    item = k.element_size()
    table, positions, keep = page_table.long().contiguous(), positions.long().contiguous(), keep.contiguous()
    path = None if path is None else path.long().contiguous()
    strides = ((c_long * 3)(*(step * item for step in new.stride()[:3])) for new in (k, v))
    call = Commit(
        layers, batch, positions.shape[1], heads * size * item, k.data_ptr(), v.data_ptr(), *strides,
        address(k_pages), address(v_pages), *k_pages.shape[1:3], table.shape[1],
        address(table), address(positions), address(path), address(keep),
    )  # fmt: skip
    assert keep.dtype == torch.bool
    functions().d2sd_write_pages(byref(call))
