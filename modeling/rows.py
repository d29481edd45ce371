"""The rows of a forward pass: their positions, their committed context, and the mask among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention import ChunkMask

# Shape letters: B requests, T rows of each, N rows of all, M pages a request, E hidden, n auxiliary layers.


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
    """The next rows of B prompts, one prompt behind the other: tensors of a pass over them are [1, N, ...]."""

    attn_mask: ChunkMask
    positions: Tensor  # [1, N] int64
    pages: Tensor  # [N] int64, the page of each row's position
    page_table: Tensor  # [B, M] int64
    context_len: Tensor  # [B] int64, committed tokens

    @staticmethod
    def of(lengths: Sequence[int], page_table: Tensor, context_len: Tensor, page_size: int) -> Chunks:
        """`lengths[b]` rows right after the context of request b. The page table covers their positions."""
        assert min(lengths) > 0
        device = context_len.device
        starts = torch.tensor([0, *accumulate(lengths)], device=device)
        rows = [(request, step) for request, length in enumerate(lengths) for step in range(length)]
        request, step = torch.tensor(rows, device=device).unbind(1)
        positions = context_len[request] + step
        pages = page_table[request, positions // page_size]
        return Chunks(ChunkMask(tuple(lengths), starts), positions[None], pages, page_table, context_len)


class ContextRows(NamedTuple):
    """Committed rows of any requests, as the drafters take them."""

    features: Tensor  # [N, n·E]
    positions: Tensor  # [N]
    pages: Tensor  # [N], 0 for rows that are not kept


@dataclass(frozen=True)
class CommittedRows:
    """Rows that a step commits, where `keep`; the pages of all drafters have one size."""

    features: Tensor  # [B, T, n·E]
    page_table: Tensor  # [B, M]
    positions: Tensor  # [B, T]
    keep: Tensor  # [B, T]
    page_size: int

    @property
    def tensors(self) -> list[Tensor]:
        return [self.features, self.page_table, self.positions, self.keep]

    @cached_property
    def rows(self) -> ContextRows:
        last = self.page_table.shape[1] - 1  # rows not kept may be past it
        places = (self.positions // self.page_size).clamp(max=last)
        pages = torch.where(self.keep, self.page_table.gather(1, places), 0)
        return ContextRows(self.features.flatten(0, 1), self.positions.flatten(), pages.flatten())
