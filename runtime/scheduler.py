"""Selects the requests of each step: by priority, then clients in turns, each first come, first served.

Each request of a client gets the turn after the one before it; its first gets the turn that is served now (start-time
fair queueing, Goyal et al., SIGCOMM 1996). A client without a running request takes the place of the newest request of
the client that runs most.

Without free pages the newest running request of the lowest priority is preempted and continues later, without computing
again what is still cached of it (`KVCacheManager`).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from d2sd.runtime.kv_cache import KVCacheManager
from d2sd.runtime.request import Limits
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.states import Copy
from d2sd.runtime.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's work: prompt chunks first, then one decode step over every sequence whose context is complete."""

    prefill: list[tuple[Sequence, int]]  # (sequence, tokens of this chunk)
    decode: list[Sequence]
    discarded: list[list[int]]  # pages whose K/V was given up since the last step, by page table
    restored: list[Copy]  # of recurrent state, before the chunks
    snapshots: list[Copy]  # the same, between the chunks and the decode step


class Scheduler:
    """Owns the queues; uses no tensors."""

    def __init__(self, limits: Limits, kv_cache: KVCacheManager) -> None:
        self._limits, self.kv_cache = limits, kv_cache
        # The next first: by priority, then by turn and arrival; so a preempted one leads its class.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []  # in the same order: the last one is preempted first
        self._turn = 0  # of the request that was admitted last
        self._preemptions = self._prefill_tokens = self._steps = 0

    def stats(self, policy: str) -> EngineStats:
        """Contents of the engine now and counts since its start; `policy` is the one in force."""
        kv_cache, states = self.kv_cache, self.kv_cache.states
        return EngineStats(
            waiting=len(self.waiting),
            running=len(self.running),
            pages_total=kv_cache.page_count - 1,
            pages_used=kv_cache.pages.used,
            pages_cached=len(kv_cache.pages.cache.idle),
            slots_total=max(0, states.count - 1),
            slots_used=states.used,
            slots_cached=states.cached,
            prefix_queried_tokens=kv_cache.queried_tokens,
            prefix_hit_tokens=kv_cache.hit_tokens,
            prefill_tokens=self._prefill_tokens,
            preemptions=self._preemptions,
            steps=self._steps,
            policy=policy,
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; raises RequestError if the pool has too few pages for it."""
        self.kv_cache.check(sequence.request)
        client = sequence.request.client
        last = max((s.turn for s in (*self.running, *self.waiting) if s.request.client == client), default=-1)
        sequence.turn = max(self._turn, last + 1)
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or cancelled sequence, running or waiting, and free its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.kv_cache.release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def launched(self, sequences: SequenceOf[Sequence]) -> None:
        """A decode step over these has begun."""
        self._steps += 1
        for sequence in sequences:
            sequence.launched += 1

    def collected(self, sequences: SequenceOf[Sequence]) -> None:
        """The tokens of the oldest step that was launched over these are read, and appended next."""
        for sequence in sequences:
            sequence.launched -= 1

    def make_room_ahead(self) -> bool:
        """Free pages behind the window, and tell whether another step can be launched before the last is collected:
        no request must be preempted for it, whatever the launched ones commit.
        """
        if self._yielding() is not None:
            return False
        if len(self.kv_cache.groups) > 1:
            self.kv_cache.settle(self.running)
        return self.kv_cache.has_pages(self.running)

    def schedule(self) -> Schedule:
        """Grow the pages of running requests, admit waiting ones, and share out the prefill chunk."""
        self.kv_cache.settle(self.running)
        for sequence in list(self.running):
            if sequence in self.running:  # not preempted on behalf of one before it
                self._grow(sequence)
        while self.waiting:
            first = self.waiting[0]
            if len(self.running) < self._limits.max_batch and self.kv_cache.admit(first):
                self._turn = max(self._turn, first.turn)
                insort(self.running, self.waiting.pop(0), key=_rank)
            elif (victim := self._yielding()) is not None and not victim.launched:  # else its tokens are read first
                victim.turn = first.turn + 1
                self._preempt(victim)
            else:
                break
        prefill = self._prefill_chunks()
        done = {id(s): n for s, n in prefill}
        # The last token of an answer may be in a step that is not collected.
        decode = [s for s in self.running if s.pending == done.get(id(s), 0) and s.remaining > s.launched]
        self._prefill_tokens += sum(done.values())
        discarded = [group.pages.take_discarded() for group in self.kv_cache.groups]
        return Schedule(prefill, decode, discarded, *self.kv_cache.states.take_copies())

    def _yielding(self) -> Sequence | None:
        """The running sequence whose place is the next waiting one's, if there is no other for it."""
        if not self.waiting:
            return None
        first, counts = self.waiting[0].request, Counter(s.request.client for s in self.running)
        client, most = max(counts.items(), key=lambda item: item[1], default=("", 0))
        if counts[first.client] or most < 2:
            return None
        victim = next(s for s in reversed(self.running) if s.request.client == client)
        return victim if victim.request.priority >= first.priority else None

    def _prefill_chunks(self) -> list[tuple[Sequence, int]]:
        """Chunks of at most `limits.prefill_chunk` tokens together: the shortest prompt first, of each client's next.

        Every client with a prompt gets a quarter of an equal share at least. A sequence waits one step for a page that
        one before it computes in this step: requests that arrive together compute a shared prefix once. With a
        recurrent state it waits for a snapshot.
        """
        budget, page_size = self._limits.prefill_chunk, self._limits.page_size
        states, cache = self.kv_cache.states, self.kv_cache.pages.cache
        chunks, in_progress = [], set[bytes]()
        prompts = _in_turns([sequence for sequence in self.running if sequence.pending])
        clients = list(dict.fromkeys(sequence.request.client for sequence in prompts))
        least = dict.fromkeys(clients, max(1, budget // (4 * max(1, len(clients)))))
        for sequence in prompts:  # all before the first snapshot: it is not written until the chunks are computed
            self.kv_cache.share(sequence)
        keys_of = [self.kv_cache.prefix_keys(sequence) for sequence in prompts]
        for place, (sequence, keys) in enumerate(zip(prompts, keys_of, strict=True)):
            first, written = divmod(sequence.cached, page_size)
            awaited = keys[first:] if states.count else keys[first : first + 1]
            if not written and in_progress.intersection(awaited):
                continue
            share = min(budget, least.pop(sequence.request.client, 0))
            if chunk := min(sequence.pending, max(share, budget - sum(least.values()))):
                chunk = states.chunk(sequence, keys, chunk, cache, keys_of[place + 1 :])
                chunks.append((sequence, chunk))
                budget -= chunk
                in_progress.update(states.useful(keys[first : (sequence.cached + chunk) // page_size]))
        return chunks

    def _grow(self, sequence: Sequence) -> None:
        """Allocate pages for the tokens a step can commit; preempts the last sequences, at worst this one."""
        while not self.kv_cache.grow(sequence):
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        """Free the pages and queue the sequence again; what is evicted of its context is recomputed from its tokens."""
        self.running.remove(sequence)
        self.kv_cache.release(sequence)
        sequence.cached = 0
        sequence.stats.preemptions += 1
        self._preemptions += 1
        insort(self.waiting, sequence, key=_rank)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.request.priority, sequence.turn, sequence.id


def _in_turns(running: SequenceOf[Sequence]) -> list[Sequence]:
    """The same sequences: the first of each client, shortest prompt first; then the second of each."""
    counts, placed = Counter[str](), []
    for sequence in running:
        client = sequence.request.client
        placed.append((sequence.request.priority, counts[client], sequence.pending, sequence))
        counts[client] += 1
    return [sequence for *_, sequence in sorted(placed, key=lambda item: item[:3])]
