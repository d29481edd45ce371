"""Committed rows' keys and values go to the pages of their requests, all layers at once.

    commit      path [B, N] says which row of the pass is the n-th of the accepted path:

                rows of the pass   0  1  2  3  4  5          path 0 2 5, at positions c, c+1, c+2
                                   │     └────┐  └───┐
                pages         … c-1│ c    c+1   c+2          c = committed length before

    injection   every row in its order (path None): a prompt's chunk, and the context K/V of a drafter. The latter come
                from two products, a norm and a rotation of [L, B, N] rows, and are as good as unfused: N is what was
                accepted, a few tokens, so only the number of launches counts, and a CUDA graph hides that.

This file is the specification and the CPU path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins.fp8 import to_pages

# Shape letters: L layers, B requests, T rows of the pass, N places to write, Hkv heads, D head size, P pages in the
# pool, Z tokens a page, M pages a request.


def write_rows(
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
    """Write rows into the pools in place.

    Args:
        k, v: [L, B, T, Hkv, D].
        k_pages, v_pages: [L, P, Z, Hkv, D], in any type; FP8 ones need the scales.
        page_table: [B, M].
        positions: [B, N], the token that each place is. No two kept places of a call are the same token.
        keep: [B, N] bool. Nothing is written where it is false, nor where the page table does not reach; page 0,
            which nobody reads, may hold anything afterwards.
        path: [B, N] in [0, T), the row that goes to each place; None: row n to place n, and N = T.
        k_scale, v_scale: [L] fp32.
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
            # index_put knows no FP8
            pages.view(torch.uint8)[:, page, slot] = to_pages(new, scale.view(-1, 1, 1, 1, 1)).view(torch.uint8)
        else:
            pages[:, page, slot] = new.to(pages.dtype)
