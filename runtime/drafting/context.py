"""Deferred drafter-KV injection.

Target features of committed tokens are queued and projected to K/V in one batched GEMM right before the drafter runs.
One GEMM then covers many steps. Rows of a page are written before the drafter reads the page, whichever request reads
it: a page that the prefix cache hands on may still have rows in the queue.

What a captured step commits stays in the step's own memory at first (`leave`): the next captured step injects it in the
passes that draft (`take`), or it is copied into the queue (`settle`).

On a CPU, padding and rows of pages that were given up (`drop`) are not computed. On CUDA that would need a device sync:
padding goes to the scratch page 0, and rows of dropped pages are written in the order of the queue, so a page's last
owner wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from d2sd.modeling.drafter import DraftModel
from d2sd.modeling.kv_pool import KVPool
from d2sd.modeling.rows import CommittedRows, ContextRows

# Shape letters: B requests, T rows, M pages a request, E hidden, n auxiliary layers, R rows of all requests.

#: Queued rows, padding included, at which the queue is flushed: a row holds n·E numbers, 12 kB for SmolLM2.
MAX_PENDING_ROWS = 4096


class PendingContext:
    """The queue of one drafter, oldest first."""

    def __init__(self, drafter: DraftModel, pool: KVPool) -> None:
        self._drafter, self._pool = drafter, pool
        self._on_cpu = pool.k.device.type == "cpu"
        self._queue: list[tuple[int, CommittedRows | ContextRows]] = []  # with the number of the push
        self._pushes = 0
        self._dropped: dict[int, int] = {}  # page -> pushes before it was dropped, for pages dropped since `_compact`
        self._left: CommittedRows | None = None  # of a captured step, newer than the queue
        self.rows = 0  # upper bound: padding and rows of dropped pages are counted until `_compact`

    def push(self, entry: CommittedRows | ContextRows) -> None:
        """Queue rows.

        The tensors are kept, not copied: those of a captured step, which overwrites them when it runs again, must be
        taken back (`pop`).
        """
        self.settle()
        self._queue.append((self._pushes, entry))
        self._pushes += 1
        self.rows += (entry.keep if isinstance(entry, CommittedRows) else entry.pages).numel()

    def pop(self) -> CommittedRows:
        """Take back what was queued last, by a commit."""
        _, entry = self._queue.pop()
        assert isinstance(entry, CommittedRows)
        self.rows -= entry.keep.numel()
        return entry

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What is queued inside is taken out of the queue again."""
        length, rows = len(self._queue), self.rows
        left, self._left = self._left, None
        try:
            yield
        finally:
            del self._queue[length:]
            self.rows, self._left = rows, left

    def leave(self, rows: CommittedRows) -> None:
        """Note rows in memory that the next captured step overwrites, newer than all that is queued. They are copied
        into the queue before anything newer, unless that step takes them (`take`).
        """
        self._left = rows

    @property
    def behind(self) -> bool:
        """Whether rows wait, queued or left."""
        return self.rows > 0 or self._left is not None

    def has_left(self, requests: int) -> bool:
        """Whether the rows left are those of so many requests."""
        return self._left is not None and len(self._left.keep) == requests

    def take(self) -> None:
        """Forget the rows left: a captured step computes them."""
        self._left = None

    def settle(self) -> None:
        """Copy the rows left, if there are any, into the queue."""
        left, self._left = self._left, None
        if left is not None:
            features, page_table, positions, keep = (tensor.clone() for tensor in left.tensors)
            self.push(CommittedRows(features, page_table, positions, keep, left.page_size))

    def drop(self, pages: Sequence[int]) -> None:
        """Drop the rows that are queued for these pages; rows pushed later are kept."""
        if pages and self._on_cpu:
            self.settle()
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


def _rows_of(entry: CommittedRows | ContextRows) -> ContextRows:
    return entry.rows if isinstance(entry, CommittedRows) else entry
