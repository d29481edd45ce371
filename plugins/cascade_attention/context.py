"""The committed, paged K/V of the requests of a pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Shape letters: B requests, P pages in the pool, Z tokens a page, M pages a request, Hkv K/V heads, D head size.


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Committed keys and values of B requests, in the pages of one layer."""

    k_pages: Tensor  # [P, Z, Hkv, D], the whole pool of the layer, contiguous
    v_pages: Tensor  # [P, Z, Hkv, D]
    page_table: Tensor  # [B, M] int64 or int32, page of each Z tokens; past the context any page in [0, P)
    context_len: Tensor  # [B] int64 or int32, committed tokens, at most M·Z
    k_scale: Tensor | None = None  # 0-dim fp32, of FP8 (E4M3) pages only
    v_scale: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.fp8 == (self.k_scale is not None) == (self.v_scale is not None), "only FP8 pages have scales"

    @property
    def fp8(self) -> bool:
        """Whether the pages hold E4M3 numbers."""
        return self.k_pages.dtype == torch.float8_e4m3fn
