"""Deferred drafter-KV injection.

Target features of committed tokens are queued and projected to K/V in one batched GEMM right before the drafter runs.
One GEMM then covers many steps. Rows of a page are written before the drafter reads the page, whichever request reads
it: a page that the prefix cache hands on may still have rows in the queue.

On a CPU, padding and rows of pages that were given up (`drop`) are not computed. On CUDA that would need a device sync:
padding goes to the scratch page 0, and rows of dropped pages are written in the order of the queue, so a page's last
owner wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from d2sd.modeling.drafter import DraftModel
from d2sd.modeling.kv_pool import KVPool

# Shape letters: B requests, T rows, M pages a request, E hidden, n auxiliary layers, R rows of all requests.

#: Queued rows, padding included, at which the queue is flushed: a row holds n·E numbers, 12 kB for SmolLM2.
MAX_PENDING_ROWS = 4096


class ContextRows(NamedTuple):
    """Committed rows of a batch, as the drafters take them."""

    features: Tensor  # [R, n·E]
    positions: Tensor  # [R]
    pages: Tensor  # [R], 0 for rows that are not kept

    def clone(self) -> ContextRows:
        return ContextRows(*(tensor.clone() for tensor in self))


@dataclass(frozen=True)
class Committed:
    """Rows of `positions` where `keep`, for the queues of all drafters, whose pages have one size."""

    features: Tensor  # [B, T, n·E]
    page_table: Tensor  # [B, M]
    positions: Tensor  # [B, T]
    keep: Tensor  # [B, T]
    page_size: int

    @cached_property
    def rows(self) -> ContextRows:
        last = self.page_table.shape[1] - 1  # rows not kept may be past it
        places = (self.positions // self.page_size).clamp(max=last)
        pages = torch.where(self.keep, self.page_table.gather(1, places), 0)
        return ContextRows(self.features.flatten(0, 1), self.positions.flatten(), pages.flatten())


class PendingContext:
    """The queue of one drafter, oldest first."""

    def __init__(self, drafter: DraftModel, pool: KVPool) -> None:
        self._drafter, self._pool = drafter, pool
        self._on_cpu = pool.k.device.type == "cpu"
        self._queue: list[tuple[int, Committed | ContextRows]] = []  # with the number of the push
        self._pushes = 0
        self._dropped: dict[int, int] = {}  # page -> pushes before it was dropped, for pages dropped since `_compact`
        self.rows = 0  # upper bound: padding and rows of dropped pages are counted until `_compact`

    def push(self, entry: Committed | ContextRows) -> None:
        """Queue rows.

        The tensors are kept, not copied: those of a captured step, which overwrites them when it runs again, must be
        taken back (`pop`).
        """
        self._queue.append((self._pushes, entry))
        self._pushes += 1
        self.rows += (entry.keep if isinstance(entry, Committed) else entry.pages).numel()

    def pop(self) -> ContextRows:
        """Take back what was queued last."""
        _, entry = self._queue.pop()
        rows = _rows_of(entry)
        self.rows -= len(rows.pages)
        return rows

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What is queued inside is taken out of the queue again."""
        length, rows = len(self._queue), self.rows
        try:
            yield
        finally:
            del self._queue[length:]
            self.rows = rows

    def drop(self, pages: Iterable[int]) -> None:
        """Drop the rows that are queued for these pages; rows pushed later are kept."""
        if self._on_cpu and self._queue:
            self._dropped.update(dict.fromkeys(pages, self._pushes))

    def holds(self, rows: int) -> bool:
        """Whether so many rows are queued; on a CPU only rows that will be computed count."""
        if self.rows >= rows and self._on_cpu:
            self._compact()
        return self.rows >= rows

    def flush(self) -> None:
        """Compute the K/V of all rows in one GEMM and write it to the pages."""
        if self._on_cpu:
            self._compact()
        parts = [_rows_of(entry) for _, entry in self._queue]
        self._queue, self.rows = [], 0
        if parts:
            self.inject(parts)

    def inject(self, parts: Sequence[ContextRows]) -> None:
        """Compute the K/V of these rows, padding included, and write it in their order: shapes depend on theirs."""
        features, positions = parts[0].features, parts[0].positions
        if len(parts) > 1:
            features = torch.cat([part.features for part in parts])
            positions = torch.cat([part.positions for part in parts])
        k, v = self._drafter.context_keys_values(features[None], positions[None])
        sizes = [len(part.pages) for part in parts]
        for part, keys, values in zip(
            parts, torch.split(k[:, 0], sizes, 1), torch.split(v[:, 0], sizes, 1), strict=True
        ):
            self._pool.write_rows(keys, values, part.pages, part.positions)

    def _compact(self) -> None:
        """Replace the queue by the rows that are to be computed. Reads which these are: not on CUDA."""
        parts: list[ContextRows] = []
        dropped_at = torch.zeros(self._pool.k.shape[1], dtype=torch.long)
        dropped_at[list(self._dropped)] = torch.tensor(list(self._dropped.values()), dtype=torch.long)
        for number, entry in self._queue:
            rows = _rows_of(entry)
            (chosen,) = ((rows.pages > 0) & (dropped_at[rows.pages] <= number)).nonzero(as_tuple=True)
            parts.append(ContextRows(*(tensor[chosen] for tensor in rows)))
        merged = ContextRows(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))) if parts else None
        self.rows = len(merged.pages) if merged else 0
        self._queue = [(self._pushes - 1, merged)] if merged and self.rows else []
        self._dropped = {}


def _rows_of(entry: Committed | ContextRows) -> ContextRows:
    return entry.rows if isinstance(entry, Committed) else entry
