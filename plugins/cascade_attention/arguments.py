"""The arguments of cascade attention: the committed context of a pass's requests, and chunks of prompts in place of a
mask: a row sees those of its chunk up to itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

# Shape letters: B requests, P pages in the pool, T new rows, Z tokens a page, M pages a request, Hkv K/V heads, D head
# size.

OP = "attention"
#: Counters of a pass: more than a GPU has multiprocessors, which programs of a split context never exceed.
COUNTERS = 1024


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


@dataclass(frozen=True)
class ChunkMask:
    """Chunks of B prompts, one behind the other: q, k and v are [1, N, ...], and each chunk is causal."""

    lengths: tuple[int, ...]  # B, rows of each; (N,), where only the device knows them (`known`)
    starts: Tensor  # [B + 1] int64, first row of each, and N
    #: [N] int64, the first position that each row sees, of its context and its chunk; None: 0.
    first: Tensor | None = None
    window: int | None = None  # most positions that a row sees; None: all

    @cached_property
    def arrived(self) -> Tensor:
        """Zeroed split counters, shared by the layers of a pass."""
        return counters(self.starts.device)

    @property
    def known(self) -> bool:
        """Whether the host knows the chunks. Where it does not, as in a graph, some may be empty."""
        return len(self.lengths) == len(self.starts) - 1

    def spans(self) -> list[slice]:
        """The rows of each chunk among the N."""
        ends = accumulate(self.lengths)
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def alone(
        self, q: Tensor, k: Tensor, v: Tensor, context: PagedContext
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, PagedContext]]:
        """The rows [1, n, ...] and the context of each prompt, one after the other."""
        for request, span in enumerate(self.spans()):
            row = slice(request, request + 1)
            prompt_context = replace(context, page_table=context.page_table[row], context_len=context.context_len[row])
            yield q[:, span], k[:, span], v[:, span], prompt_context


def move_broken(k: Tensor, v: Tensor) -> None:
    """Make values [..., D] that are not finite 0, and their keys NaN, in place.

    A key that a row does not see has the weight 0, which times NaN is NaN; its score is hidden whatever it is.
    """
    broken = ~v.abs().amax(-1, keepdim=True).isfinite()
    k.masked_fill_(broken, torch.nan)
    v.masked_fill_(broken, 0)


def counters(device: torch.device) -> Tensor:
    """[COUNTERS] int32, zeros: how many splits of a tile are done. One layer leaves them as the next needs them."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
