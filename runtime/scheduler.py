"""Selects the requests of each step, first come, first served. Without free pages the newest running request is
preempted and recomputed later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from d2sd.errors import RequestError
from d2sd.runtime.buckets import floor_bucket, prefill_rows
from d2sd.runtime.pages import PageAllocator
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's work: prompt chunks first, then one decode step over every sequence whose context is complete."""

    prefill: list[tuple[Sequence, int]]  # (sequence, tokens of this chunk)
    decode: list[Sequence]


def prefill_calls(
    chunks: list[tuple[Sequence, int]], budget: int, max_requests: Callable[[int], int]
) -> list[list[tuple[Sequence, int]]]:
    """Group chunks of one length bucket into forward passes of at most `budget` rows, padding included.

    `max_requests(rows)` is the most requests that the model runner accepts in one call of `rows` rows a request.
    """
    calls: list[list[tuple[Sequence, int]]] = []
    by_rows: dict[int, list[tuple[Sequence, int]]] = {}
    for sequence, count in chunks:
        by_rows.setdefault(prefill_rows(count, budget), []).append((sequence, count))
    for rows, group in by_rows.items():
        size = floor_bucket(min(budget // rows, max_requests(rows)))
        calls += [group[start : start + size] for start in range(0, len(group), size)]
    return calls


class Scheduler:
    """Owns the queues and the pages; uses no tensors."""

    def __init__(self, limits: Limits, block_size: int, page_count: int) -> None:
        """A decode step commits at most `block_size` tokens; a pool has `page_count` pages, page 0 included."""
        self._limits, self._growth, self.page_count = limits, block_size, page_count
        self.pages = PageAllocator(page_count)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first

    def check(self, request: Request) -> None:
        """Raise RequestError if the pool has too few pages for the request's full length."""
        needed = self._limits.pages_for(len(request.prompt) + request.max_new_tokens + self._growth)
        if needed > self.page_count - 1:
            raise RequestError(
                "the request needs more K/V pages than there are", where="limits.kv_memory",
                found=f"{needed} pages needed", expected=f"at most {self.page_count - 1}",
                fix="raise limits.kv_memory, or ask for fewer tokens",
            )  # fmt: skip

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; raises RequestError if the pool has too few pages for it."""
        self.check(sequence.request)
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or cancelled sequence, running or waiting, and free its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self) -> Schedule:
        """Grow the pages of running requests, admit waiting ones, and share out the prefill chunk."""
        for sequence in list(self.running):
            if sequence in self.running:  # not preempted on behalf of an older one
                self._grow(sequence)
        while self.waiting and len(self.running) < self._limits.max_batch:
            sequence = self.waiting[0]
            pages = self.pages.take(self._limits.pages_for(len(sequence.tokens) - 1 + self._growth))
            if pages is None:
                break
            sequence.pages = pages
            self.running.append(self.waiting.popleft())
        budget = self._limits.prefill_chunk
        prefill = []
        for sequence in self.running:
            chunk = min(sequence.pending, budget)
            if chunk:
                prefill.append((sequence, chunk))
                budget -= chunk
        done = {id(s): n for s, n in prefill}
        decode = [s for s in self.running if s.pending == done.get(id(s), 0)]
        return Schedule(prefill, decode)

    def _grow(self, sequence: Sequence) -> None:
        """Allocate pages for the tokens a step can commit; preempts the newest requests, at worst this one."""
        wanted = self._limits.pages_for(len(sequence.tokens) - 1 + self._growth) - len(sequence.pages)
        while wanted > 0:
            pages = self.pages.take(wanted)
            if pages is not None:
                sequence.pages += pages
                return
            newest = self.running[-1]
            self._preempt(newest)
            if newest is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        """Free the pages and put the sequence at the head of the queue; its context is recomputed from its tokens."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.cached = 0
        sequence.stats.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pages.give_back(sequence.pages)
        sequence.pages = []
