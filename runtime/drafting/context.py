"""The context of the drafters: features of committed tokens, from the step that commits them to the drafters' pages.

A drafter's K/V of a committed token is a product of the target's features of it. No pass needs it before the drafter
runs again, so it is made as late as that, in one product of many rows. Each row is, for each drafter, in one of three
states:

                    add, of a prompt chunk or a step without a graph
                                     |
                                     v          inject, replay: before the drafter runs,
    step replayed                 QUEUED ----------- or where the queue is full -------------> INJECTED
         |                           ^                                                            ^
         |                           | anything else: add, drop, inject, another batch,           |
         v                           | a drafter that the next graph does not run                 |
       LEFT -------------------------+                                                            |
         |                                                                                        |
         +--- replay of a graph with as many requests that runs the drafter ----------------------+

QUEUED: on the host's queue of the drafter, in tensors of its own, of MAX_PENDING_BYTES at most, however long a prompt
is. LEFT: in the memory that the graphs share, which the next replay overwrites; newer than all that is queued.
INJECTED: in the drafter's pages. A graph injects in the passes that draft: both read the drafter's weights once. The
next step may serve other requests: rows have the page table they were committed with.

Rows of a page are written before the drafter reads the page, whichever request reads it: a page that the prefix cache
hands on may still have rows in the queue. On a CPU, padding and rows of pages that were given up (`drop`) are not
computed. On CUDA that would need a device sync: padding goes to the scratch page 0, and what was queued before pages
were dropped is written before what was queued behind that, so a page's last owner wins. Pages behind the window of a
drafter's layers are given up while the request runs; those layers' page numbers are another table's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.kv_pool import CommittedRows, ContextRows, KVPool
from d2sd.modeling.where import Where
from d2sd.policies import DrafterRole
from d2sd.runtime.memory import MAX_PENDING_BYTES
from d2sd.runtime.sequence import Sequence as Decoding

# Shape letters: B requests, T rows of each, G block size γ, M pages a request, R rows of all requests, n auxiliary
# layers, E hidden.

#: Rows, padding included, that fill a queue, if MAX_PENDING_BYTES do not: a row holds n·E numbers, 12 kB for SmolLM2
#: and 41 kB for Qwen3-8B.
MAX_PENDING_ROWS = 4096
#: A CPU takes 40 us for a row of SmolLM2, and everyone waits meanwhile: a queue that is full injects its oldest rows
#: alone, 1 / _PARTS of what it holds at a time.
_PARTS = 16
#: Entries of a CPU's queue that stay when others are injected, above which they become one.
_MOST_ENTRIES = 64


class DrafterContext:
    """The context of all drafters of a runner, whose pages are in `pools`; the states are above."""

    def __init__(
        self, drafters: Mapping[DrafterRole, DraftModel], pools: Mapping[DrafterRole, KVPool], dtype: torch.dtype
    ) -> None:
        """`drafters` are those that have pages of their own, `pools`; `dtype` is that of the features.

        Its methods take the roles of any drafters, and pass over those without pages of their own.
        """
        self._queues = {role: _Queue(drafter, pools[role]) for role, drafter in drafters.items()}
        self._configs, self._pools, self._dtype = [d.config for d in drafters.values()], [*pools.values()], dtype
        #: Page tables that any drafter's layers have, of those of `Where`: rows come with the pages of these.
        self.tables = 1 + max((table for pool in self._pools for table in pool.pages), default=0)
        self._on_cpu = all(pool.device.type == "cpu" for pool in self._pools)
        self._ready: frozenset[DrafterRole] = frozenset()  # those that `inject` was called for since the last `add`
        self._memory: CommittedRows | None = None  # of the captured steps, G rows a request
        self._left: CommittedRows | None = None  # rows LEFT in that memory
        self._drops = self._left_drops = 0  # pages were dropped so often on CUDA, and before the rows LEFT
        self._to_inject: dict[DrafterRole, CommittedRows] | None = None  # by drafter; None: not inside a captured step
        self._committed: CommittedRows | None = None  # by the captured step
        self._room: CommittedRows | None = None  # in the memory, for these rows

    @property
    def pending_rows(self) -> dict[DrafterRole, int]:
        """Rows QUEUED for each drafter; an upper bound."""
        return {role: queue.rows for role, queue in self._queues.items()}

    def pending_of(self, sequences: Sequence[Decoding]) -> dict[DrafterRole, int]:
        """Rows QUEUED for each drafter that it must inject before it drafts for these sequences; an upper bound."""
        if not self._on_cpu:
            return self.pending_rows
        behind = {role: sum(s.cached - s.injected.get(role, 0) for s in sequences) for role in self._queues}
        return {role: min(queue.rows, behind[role]) for role, queue in self._queues.items()}

    def add(self, rows: CommittedRows | ContextRows) -> None:
        """Queue the rows for all drafters. In a captured step, `end` leaves them in the graphs' memory.

        The tensors are kept, not copied.
        """
        if self._to_inject is not None:
            assert isinstance(rows, CommittedRows)
            self._committed = rows
            return
        self._queue_left()
        self._ready = frozenset()
        for queue in self._queues.values():
            queue.push(rows, self._drops, on_cpu=self._on_cpu)

    @torch.inference_mode()
    def inject(self, drafters: Collection[DrafterRole], where: Where | None = None) -> None:
        """Inject all rows of these drafters, which are about to run without a graph; on a CPU those of the pages of
        `where` alone, if it is given, because the requests of the others may end before a drafter runs for them.

        Other drafters stay behind until their queues are full: one product for many steps reads their weights once.
        """
        self._queue_left()
        self._flush(drafters, where if self._on_cpu else None)
        self._ready = frozenset(drafters)

    def take(self, drafter: DrafterRole) -> CommittedRows | None:
        """Rows that the pass of a drafter must inject: of its first pass in a captured step; otherwise None."""
        if self._to_inject is not None:
            return self._to_inject.pop(drafter, None)
        assert drafter in self._ready or not self.pending_rows.get(drafter), "call inject first"
        assert self._left is None, "call inject first"
        return None

    @torch.inference_mode()
    def drop(self, *pages: Sequence[int]) -> None:
        """Drop the rows of these pages, of each page table, whose K/V is not needed any more; call it before they are
        written again.
        """
        if any(pages) and not self._on_cpu:
            self._drops += 1
        elif any(pages):
            self._queue_left()
            for queue in self._queues.values():
                queue.drop(*pages)

    # -- captured steps ------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def reserve(self, requests: int, pages: int, rows: int) -> None:
        """Allocate the memory that graphs of up to `requests` requests share, once; `pages` and `rows` a request."""
        if self._memory is not None or not self._queues:
            return
        config, pool = self._configs[0], self._pools[0]
        device, width = pool.device, len(config.target_layer_ids) * config.body.hidden_size
        places = torch.zeros(requests, rows, dtype=torch.long, device=device)
        table = torch.zeros(requests, pages, dtype=torch.long, device=device)
        self._memory = CommittedRows(
            features=torch.zeros(*places.shape, width, dtype=self._dtype, device=device),
            tables=tuple(table.clone() for _ in range(self.tables)),
            positions=places,
            keep=torch.zeros_like(places, dtype=torch.bool),
            page_size=pool.page_size,
        )

    @property
    def memory(self) -> list[Tensor]:
        """The tensors of the memory that graphs share; none before `reserve`."""
        return [] if self._memory is None else self._memory.tensors

    def begin(self, requests: int, drafters: Collection[DrafterRole]) -> None:
        """Begin a captured step of these drafters: each injects the rows LEFT in its first pass (`take`).

        All rows of the memory, kept or not: shapes do not depend on the policy of the step before.
        """
        self._to_inject = {}
        if self._memory is not None:
            rows = self._memory.first(requests, self._memory.keep.shape[1])
            self._to_inject = dict.fromkeys(self._queues.keys() & set(drafters), rows)

    def room(self, requests: int) -> CommittedRows | None:
        """Where a captured step may leave its rows itself, for `add`, once it has injected all that it does: in the
        memory, G rows a request. None: it may not.
        """
        if self._to_inject is not None and self._memory is not None:
            self._room = self._memory.first(requests, self._memory.keep.shape[1])
        return self._room

    @torch.inference_mode()
    def end(self) -> None:
        """End a captured step: copy the rows that it added into the memory, unless they are there (`room`)."""
        committed, room = self._committed, self._room
        self._committed = self._room = self._to_inject = None
        if committed is None or self._memory is None or committed is room:
            return
        requests, length = committed.keep.shape
        if length < self._memory.keep.shape[1]:
            self._memory.keep[:requests, length:].zero_()
        for slot, tensor in zip(self._memory.first(requests, length).tensors, committed.tensors, strict=True):
            slot.copy_(tensor)

    @contextmanager
    def replay(self, requests: int, length: int, drafters: Collection[DrafterRole]) -> Iterator[None]:
        """Around the replay of a graph that runs these drafters over `requests` and commits up to `length` rows of
        each: prepares what it injects, and notes what it leaves.
        """
        if self._memory is None:
            yield
            return
        with torch.inference_mode():
            drafters = self._queues.keys() & set(drafters)
            injecting = drafters if self._left is not None and len(self._left.keep) == requests else ()
            self._queue_left(but=injecting)
            self._flush(drafters)
            if drafters and not injecting:
                self._memory.keep.zero_()
        yield
        self._left, self._left_drops = self._memory.first(requests, length), self._drops

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Captured steps that run inside find no rows LEFT, and change the state of none; also after an error."""
        before = [tensor.clone() for tensor in self.memory]
        if self._memory is not None:
            self._memory.keep.zero_()
        try:
            yield
        finally:
            self._to_inject = self._committed = self._room = None
            for tensor, value in zip(self.memory, before, strict=True):
                tensor.copy_(value)

    # -- transitions ---------------------------------------------------------------------------------------------------

    def _queue_left(self, but: Collection[DrafterRole] = ()) -> None:
        """LEFT -> QUEUED, in a copy, for all drafters but those of a graph that injects them."""
        left, self._left = self._left, None
        queues = [queue for which, queue in self._queues.items() if which not in but]
        if left is not None and queues:
            copied = left.with_tensors(map(torch.clone, left.tensors))
            for queue in queues:
                queue.push(copied, self._left_drops, on_cpu=self._on_cpu)

    def _flush(self, drafters: Collection[DrafterRole], where: Where | None = None) -> None:
        """QUEUED -> INJECTED, of these drafters; of all pages, or of those of `where`."""
        for which, queue in self._queues.items():
            if which in drafters and where is not None:
                queue.flush_pages(where)
            elif which in drafters:
                queue.flush(on_cpu=self._on_cpu)


class _Queue:
    """The rows QUEUED for one drafter, oldest first."""

    def __init__(self, drafter: DraftModel, pool: KVPool) -> None:
        self._drafter, self._pool = drafter, pool
        #: With the number of the push, or, on CUDA, of drops before it.
        self._entries: list[tuple[int, CommittedRows | ContextRows]] = []
        self._pushes = 0
        #: By page table: page -> pushes before it was dropped, for pages dropped since the queue was empty.
        self._dropped: dict[int, dict[int, int]] = defaultdict(dict)
        self.rows = 0  # upper bound: with padding and rows of dropped pages

    @torch.inference_mode()
    def push(self, entry: CommittedRows | ContextRows, drops: int, *, on_cpu: bool) -> None:
        """Append rows that were committed behind so many drops. A queue that is full is flushed, and one without room
        before, so that a large entry is not copied into one product with it; on a CPU as far as there is no room.
        """
        rows = _size(entry)
        most = max(1, min(MAX_PENDING_ROWS, MAX_PENDING_BYTES * rows // entry.features.nbytes))
        self._make_room(most - rows, most, on_cpu=on_cpu)
        self._entries.append((self._pushes if on_cpu else drops, entry))
        self._pushes += 1
        self.rows += rows
        self._make_room(most - 1, most, on_cpu=on_cpu)

    def _make_room(self, left: int, most: int, *, on_cpu: bool) -> None:
        """Flush the queue until it has `left` rows at most, or none."""
        while self.rows > max(left, 0):
            self.flush(on_cpu=on_cpu, rows=-(-most // _PARTS) if on_cpu else None)

    def drop(self, *pages: Sequence[int]) -> None:
        """Note that rows pushed so far for these pages, of each page table, are not to be computed."""
        if self._entries:
            for table, given_up in enumerate(pages):
                self._dropped[table].update(dict.fromkeys(given_up, self._pushes))

    def flush(self, *, on_cpu: bool, rows: int | None = None) -> None:
        """Compute the K/V of the oldest entries, of `rows` rows or a few more, in one product, and write it to the
        pages, those between two drops at once. By default of all.
        """
        taken = list[tuple[int, CommittedRows | ContextRows]]()
        last = 0 if rows is None else max(self.rows - rows, 0)
        while self._entries and self.rows > last:
            taken.append(self._entries.pop(0))
            self.rows -= _size(taken[-1][1])
        self._inject(self.kept(taken) if on_cpu else taken)  # on a GPU the host would wait to read what is kept

    def flush_pages(self, where: Where) -> None:
        """Compute and write all rows of these requests' pages, and forget padding; on a CPU."""
        wanted = dict[int, Tensor]()
        for table, count in self._pool.pages.items():
            wanted[table] = torch.zeros(count, dtype=torch.bool)
            wanted[table][where.tables[table]] = wanted[table][0] = True
        taken, left = list[tuple[int, ContextRows]](), list[tuple[int, CommittedRows | ContextRows]]()
        for number, entry in self._entries:
            rows = _rows_of(entry)
            mine = torch.stack([of_table[rows.pages[table]] for table, of_table in wanted.items()]).any(0)
            if (count := int(mine.sum())) == len(mine):
                taken.append((number, rows))
            elif count:
                taken.append((number, _chosen(rows, mine)))
                left.append((number, _chosen(rows, ~mine)))
            else:
                left.append((number, entry))
        self._entries = left if len(left) <= _MOST_ENTRIES else [*self.kept(left)]
        self.rows = sum(_size(entry) for _, entry in self._entries)
        self._inject(self.kept(taken))

    def _inject(self, taken: Sequence[tuple[int, CommittedRows | ContextRows]]) -> None:
        """Compute the K/V of these in one product, and write it to the pages; the queue has others."""
        if not self._entries:
            self._dropped = defaultdict(dict)
        parts = [_together([entry for _, entry in same]) for _, same in groupby(taken, key=itemgetter(0))]
        if not parts:
            return
        whole = _joined(parts)
        k, v = self._drafter.context_keys_values(whole.features[None], whole.positions[None])
        sizes = [len(part.positions) for part in parts]
        for part, keys, values in zip(
            parts, torch.split(k[:, 0], sizes, 1), torch.split(v[:, 0], sizes, 1), strict=True
        ):
            self._pool.write_rows(keys, values, part.pages, part.positions)

    def kept(self, entries: Sequence[tuple[int, CommittedRows | ContextRows]]) -> list[tuple[int, ContextRows]]:
        """The rows of these that are to be computed: no padding, nothing of pages that were dropped. On a CPU."""
        dropped_at = {table: _dropped_at(self._dropped[table], count) for table, count in self._pool.pages.items()}
        parts = [_without_dropped(_rows_of(entry), number, dropped_at) for number, entry in entries]
        return [(self._pushes - 1, _joined(parts))] if any(len(part.positions) for part in parts) else []


def _size(entry: CommittedRows | ContextRows) -> int:
    """Rows, padding and those of dropped pages included."""
    return (entry.keep if isinstance(entry, CommittedRows) else entry.positions).numel()


def _dropped_at(dropped: Mapping[int, int], count: int) -> Tensor:
    """[P] int64, pushes before each page was dropped; 0: it was not."""
    at = torch.zeros(count, dtype=torch.long)
    at[list(dropped)] = torch.tensor(list(dropped.values()), dtype=torch.long)
    return at


def _without_dropped(rows: ContextRows, number: int, dropped_at: Mapping[int, Tensor]) -> ContextRows:
    """The rows of push `number` that a drafter keeps, in any of the pages that its layers have: [P] by page table."""
    pages = list(rows.pages)
    for table, at in dropped_at.items():
        pages[table] = torch.where(at[pages[table]] <= number, pages[table], 0)
    (chosen,) = torch.stack([pages[table] for table in dropped_at]).amax(0).nonzero(as_tuple=True)
    return _chosen(rows._replace(pages=tuple(pages)), chosen)


def _chosen(rows: ContextRows, which: Tensor) -> ContextRows:
    """Some of the rows, by their numbers or a mask."""
    return ContextRows(rows.features[which], rows.positions[which], tuple(own[which] for own in rows.pages))


def _joined(parts: Sequence[ContextRows]) -> ContextRows:
    if len(parts) == 1:
        return parts[0]
    features, positions, pages = zip(*parts, strict=True)
    return ContextRows(torch.cat(features), torch.cat(positions), tuple(map(torch.cat, zip(*pages, strict=True))))


def _together(entries: Sequence[CommittedRows | ContextRows]) -> ContextRows:
    """The rows of all entries; steps of one shape first become one, so that the host launches little for each."""
    parts = list[ContextRows]()
    for _, same in groupby(entries, key=_shape):
        alike = list(same)
        steps = [one for one in alike if isinstance(one, CommittedRows)]
        if len(steps) > 1:
            tensors = map(torch.cat, zip(*(step.tensors for step in steps), strict=True))
            parts.append(steps[0].with_tensors(tensors).rows)
        else:
            parts += map(_rows_of, alike)
    return _joined(parts)


def _shape(entry: CommittedRows | ContextRows) -> tuple[int, int] | None:
    """Rows and page-table columns of each request of a step; None: chunks of prompts."""
    return None if isinstance(entry, ContextRows) else (entry.keep.shape[1], entry.tables[0].shape[1])


def _rows_of(entry: CommittedRows | ContextRows) -> ContextRows:
    return entry.rows if isinstance(entry, CommittedRows) else entry
