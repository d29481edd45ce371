"""Chunks of prompts in place of a mask: a row sees those of its chunk up to itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention.context import PagedContext

#: Counters of a pass: more than a GPU has multiprocessors, which programs of a split context never exceed.
COUNTERS = 1024


@dataclass(frozen=True)
class ChunkMask:
    """Chunks of B prompts, one behind the other: q, k and v are [1, N, ...], and each chunk is causal."""

    lengths: tuple[int, ...]  # B, rows of each, at least 1
    starts: Tensor  # [B + 1] int64, first row of each, and N

    @cached_property
    def arrived(self) -> Tensor:
        """Zeroed split counters, shared by the layers of a pass."""
        return counters(self.starts.device)

    def spans(self) -> list[slice]:
        """The rows of each chunk among the N."""
        ends = accumulate(self.lengths)
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def alone(
        self, q: Tensor, k: Tensor, v: Tensor, context: PagedContext
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, PagedContext]]:
        """The rows [1, n, ...] and the context of each prompt, one after the other."""
        for request, span in enumerate(self.spans()):
            one = slice(request, request + 1)
            own = replace(context, page_table=context.page_table[one], context_len=context.context_len[one])
            yield q[:, span], k[:, span], v[:, span], own


def counters(device: torch.device) -> Tensor:
    """[COUNTERS] int32, zeros: how many splits of a tile are done. One layer leaves them as the next needs them."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
