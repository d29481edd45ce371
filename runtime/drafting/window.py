"""The part of a long context that drafters read: its last pages, and its first.

A drafter that was trained on short texts drafts worse behind long ones. Keys carry the positions at which they were
computed, so that pages in between can be left out of the table and nothing else changes: the target reads them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Shape letters: B requests, M pages a request, W pages of a window.

#: Pages of the beginning that are read: attention goes to a text's first tokens whatever they say.
FIRST_PAGES = 1


@dataclass(frozen=True, slots=True)
class Window:
    """Whole pages; the last of them may be half full."""

    first: int
    last: int

    @staticmethod
    def of(tokens: int, page_size: int) -> Window:
        """A window of at most `tokens` tokens, or of one page: the first page, if there is room, and the last ones."""
        pages = max(1, tokens // page_size)
        first = min(FIRST_PAGES, pages - 1)
        return Window(first, pages - first)

    def pages(self, page_table: Tensor, context_len: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
        """page_table [B, M] and context_len [B] of what is read: [B, min(M, W)], and its tokens."""
        used = (context_len + page_size - 1) // page_size
        left_out = (used - self.first - self.last).clamp(min=0)
        column = torch.arange(min(page_table.shape[1], self.first + self.last), device=page_table.device)
        shift = torch.where(column < self.first, 0, left_out[:, None])
        return page_table.gather(1, column + shift), context_len - left_out * page_size
