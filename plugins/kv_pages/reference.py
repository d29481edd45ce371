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

from d2sd.plugins.shared.fp8 import to_pages

# Shape letters: L layers, B requests, T rows of the pass, N places to write, Hkv heads, D head size, P pages in the
# pool, Z tokens a page, M pages a request.


def write_pages_reference(
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
    """`write_pages`, same arguments, on any device."""
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
