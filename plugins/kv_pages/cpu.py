"""The paged K/V write as a call of the compiled library: tensors on a CPU, arguments as of the specification."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from ctypes import Structure, byref, c_long, c_void_p

import torch
from torch import Tensor

from d2sd.plugins.cpu.library import address, functions


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


def write_pages(k, v, k_pages, v_pages, page_table, positions, keep, path=None, k_scale=None, v_scale=None):
    """Write what is `supported`; FP8 pages are not, so the scales are unused."""
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
