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


def _picked(k: Tensor, v: Tensor, k_pages: Tensor, *_: object, **__: object) -> Implementation:
    return dispatch.pick(OP, k_pages, pages=True, library=supported(k, v, k_pages))


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


write_pages = dispatch.op(
    OP,
    write_pages_reference,
    "d2sd.plugins.kv_pages.triton.kernel:write_pages_triton",
    library=write_pages_cpu,
    picked=_picked,
)
