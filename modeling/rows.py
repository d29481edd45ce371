"""The rows of a forward pass: their positions, their committed context, and the mask among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

# Shape letters: B requests, T rows of each, N rows of all, M pages a request.


@dataclass(frozen=True, slots=True)
class Rows:
    """B requests, each with T new rows over its committed context."""

    positions: Tensor  # [B, T] int64, absolute position of each row: in a tree, context length + depth
    attn_mask: Tensor  # [B, T, T] bool, row t may attend to row u
    page_table: Tensor  # [B, M] int64
    context_len: Tensor  # [B] int64, committed tokens

    @staticmethod
    def chain(length: int, page_table: Tensor, context_len: Tensor) -> Rows:
        """Consecutive rows after the context under a causal mask."""
        steps = torch.arange(length, device=context_len.device)
        attn_mask = (steps[:, None] >= steps).expand(len(context_len), length, length)
        return Rows(context_len[:, None] + steps, attn_mask, page_table, context_len)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The next rows of B prompts, one prompt behind the other: tensors of a pass over them are [1, N, ...].

    A row sees its request's context and the rows of its own chunk up to itself.
    """

    lengths: tuple[int, ...]  # B, rows of each, at least 1; N together
    starts: Tensor  # [B + 1] int64, first row of each, and N
    positions: Tensor  # [1, N] int64
    pages: Tensor  # [N] int64, the page of each row's position
    page_table: Tensor  # [B, M] int64
    context_len: Tensor  # [B] int64, committed tokens

    @staticmethod
    def of(lengths: Sequence[int], page_table: Tensor, context_len: Tensor, page_size: int) -> Chunks:
        """`lengths[b]` rows right after the context of request b. The page table covers their positions."""
        assert min(lengths) > 0
        first = torch.tensor([0, *accumulate(lengths)])
        request = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        steps = torch.arange(len(request)) - first[request]
        starts, request, steps = (host.to(context_len.device) for host in (first, request, steps))
        positions = context_len[request] + steps
        pages = page_table[request, positions // page_size]
        return Chunks(tuple(lengths), starts, positions[None], pages, page_table, context_len)

    def spans(self) -> list[slice]:
        """The rows of each request among the N."""
        ends = accumulate(self.lengths)
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]
