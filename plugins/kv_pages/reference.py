"""Writes K/V of committed rows into the pages of their requests, all layers at once.

    commit      path [B, N] says which row of the pass is the n-th of the accepted path:

                rows of the pass   0  1  2  3  4  5          path 0 2 5, at positions c, c+1, c+2
                                   │     └────┐  └───┐
                pages         … c-1│ c    c+1   c+2          c = committed length before

    injection   every row in its order (path None): a prompt's chunk, and the context K/V of a drafter. The latter are
                computed by unfused PyTorch ops. N is only the accepted tokens, so launch overhead dominates, and a
                CUDA graph removes it.

This file is the specification, and what runs where there is no kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins.dispatch import Implementation, op, pick
from d2sd.plugins.kv_pages.cpu import supported
from d2sd.plugins.shared.fp8 import to_pages

# Shape letters: L layers, B requests, T rows of the pass, N places to write, Hkv heads, D head size, P pages in the
# pool, Z tokens a page, M pages a request.


OP = "the paged K/V write"


def _picked(k: Tensor, v: Tensor, k_pages: Tensor, *_: object, **__: object) -> Implementation:
    return pick(OP, k_pages, pages=True, library=k_pages.is_cpu and supported(k, v, k_pages))


@op(OP, launcher="kernel", picked=_picked)
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
    page_size = k_pages.shape[2]
    block, last = positions // page_size, page_table.shape[1] - 1
    page = torch.where(keep & (block <= last), page_table.gather(1, block.clamp(max=last)), 0)
    slot = positions % page_size
    for new, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        if path is not None:
            new = new[:, torch.arange(len(path), device=path.device)[:, None], path]
        if pages.dtype == torch.float8_e4m3fn:
            assert scale is not None
            # index_put does not support FP8
            pages.view(torch.uint8)[:, page, slot] = to_pages(new, scale.view(-1, 1, 1, 1, 1)).view(torch.uint8)
        else:
            pages[:, page, slot] = new.to(pages.dtype)
