"""The part of a long context that drafters read: its last pages, and its first.

A drafter that was trained on short texts drafts worse behind long ones. Keys carry the positions at which they were
computed, so that pages in between can be left out of the table and nothing else changes: the target reads them all.
A layer that was trained with a window of its own does not see the first ones behind a cut: they are out of its reach.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from d2sd.modeling.kv_pool import Rows

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

    def cut(self, rows: Rows, page_size: int) -> Rows:
        """The same rows over what is read of their context: page tables [B, min(M, W)], and its tokens."""
        where, read = rows.where, self.first + self.last
        used = (where.context_len + (page_size - 1)) // page_size
        left_out = (used - read).clamp(min=0)
        column = torch.arange(min(where.pages.shape[1], read), device=where.pages.device)
        columns = column + torch.where(column < self.first, 0, left_out[:, None])
        part = where.map_tables(lambda table: table.gather(1, columns))
        part = replace(part, context_len=where.context_len - left_out * page_size)
        return replace(rows, where=part, cut=self.first * page_size)
