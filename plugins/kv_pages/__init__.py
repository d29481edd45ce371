"""The paged K/V write: `reference.py` is the specification, `triton/` the kernel, `cpu.py` the CPU's.

`write_pages` picks the implementation by the rules of `d2sd.plugins.dispatch`.
"""

from __future__ import annotations

from torch import Tensor

from d2sd.plugins import dispatch
from d2sd.plugins.dispatch import Implementation
from d2sd.plugins.kv_pages import cpu
from d2sd.plugins.kv_pages.reference import write_pages_reference

__all__ = ["write_pages"]


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
    picked = dispatch.pick("attention", k_pages, pages=True, library=cpu.supported(k, v, k_pages))
    write = cpu.write_pages_cpu if picked is Implementation.LIBRARY else write_pages_reference
    if picked is Implementation.TRITON:
        from d2sd.plugins.kv_pages.triton.launch import write_pages_triton

        write = write_pages_triton
    write(k, v, k_pages, v_pages, page_table, positions, keep, path, k_scale, v_scale)
