"""Selects the requests of each step: by priority, then clients in turns, each first come, first served.

Each request of a client gets the turn after the one before it; its first gets the turn that is served now (start-time
fair queueing, Goyal et al., SIGCOMM 1996). A client without a running request takes the place of the newest request of
the client that runs most.

A request starts with the cached pages of its longest known prefix. Without free pages the newest running request of the
lowest priority is preempted and continues later, without computing again what is still cached of it.

Layers with a window have pages of their own (`PageGroup`). Once tokens are committed, the pages that no further row
sees are given back; a step that is launched and not collected sees none of them either. A prefix is known as far as the
pages that its next row sees are cached.

Layers with a recurrent state have a slot a request (`StateSlots`); a prefix is known as far as there is a snapshot.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from time import monotonic

from d2sd.errors import RequestError
from d2sd.runtime.pages import PageAllocator, PageGroup, Stored, extend_keys, page_row
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.states import Copy, StateSlots
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
    """Owns the queues and the pages; uses no tensors."""

    def __init__(
        self,
        limits: Limits,
        block_size: int,
        page_count: int,
        windowed_count: int = 0,
        window: int | None = None,
        slots: int = 0,
    ) -> None:
        """A decode step commits at most `block_size` tokens; a pool has `page_count` pages, page 0 included.

        Layers with a window, of `window` tokens at most, have `windowed_count` pages of their own. Layers with a
        recurrent state have `slots`, slot 0 included.
        """
        self._limits, self._growth, self.page_count = limits, block_size, page_count
        self.pages = PageAllocator(page_count)
        self.groups = [PageGroup(self.pages)]
        if window is not None:
            self.groups.append(PageGroup(PageAllocator(windowed_count), window))
        self.states = StateSlots(slots, limits.max_batch, limits.page_size)
        self.waiting: list[
            Sequence
        ] = []  # next first: by priority, then by turn and arrival; so a preempted one leads its class
        self.running: list[Sequence] = []  # in the same order: the last one is preempted first
        self._turn = 0  # of the request that was admitted last
        self._preemptions = self._queried_tokens = self._hit_tokens = self._prefill_tokens = self._steps = 0

    def stats(self, policy: str) -> EngineStats:
        """Contents of the engine now and counts since its start; `policy` is the one in force."""
        return EngineStats(
            waiting=len(self.waiting),
            running=len(self.running),
            pages_total=self.page_count - 1,
            pages_used=self.pages.used,
            pages_cached=len(self.pages.cache.idle),
            slots_total=max(0, self.states.count - 1),
            slots_used=self.states.used,
            slots_cached=self.states.cached,
            prefix_queried_tokens=self._queried_tokens,
            prefix_hit_tokens=self._hit_tokens,
            prefill_tokens=self._prefill_tokens,
            preemptions=self._preemptions,
            steps=self._steps,
            policy=policy,
        )

    def check(self, request: Request) -> None:
        """Raise RequestError if the pools have too few pages for the request's full length."""
        whole = self._limits.pages_for(len(request.prompt) + request.max_new_tokens + self._growth)
        for group in self.groups:
            needed = (
                whole if group.window is None else min(whole, self._limits.pages_within(group.window, self._growth))
            )
            if needed > group.pages.count - 1:
                raise RequestError(
                    "the request needs more K/V pages than there are",
                    where="limits.kv_memory",
                    found=f"{needed} pages needed",
                    expected=f"at most {group.pages.count - 1}",
                    fix="ask for fewer tokens{or_more_pages}",
                )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; raises RequestError if the pool has too few pages for it."""
        self.check(sequence.request)
        client = sequence.request.client
        last = max((s.turn for s in (*self.running, *self.waiting) if s.request.client == client), default=-1)
        sequence.turn = max(self._turn, last + 1)
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or cancelled sequence, running or waiting, and free its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
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

    def has_pages_ahead(self) -> bool:
        """Whether no request must be preempted for another step, whatever the launched ones commit."""
        if self._yielding() is not None:
            return False
        if len(self.groups) > 1:  # pages behind the window are there for the next step
            self._settle()
        missing = ((group, sum(self._missing(group, s) for s in self.running)) for group in self.groups)
        return all(group.pages.has(count) for group, count in missing)

    def schedule(self) -> Schedule:
        """Grow the pages of running requests, admit waiting ones, and share out the prefill chunk."""
        self._settle()
        for sequence in list(self.running):
            if sequence in self.running:  # not preempted on behalf of one before it
                self._grow(sequence)
        while self.waiting:
            first = self.waiting[0]
            if len(self.running) < self._limits.max_batch and self._admit(first):
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
        discarded = [group.pages.take_discarded() for group in self.groups]
        return Schedule(prefill, decode, discarded, *self.states.take_copies())

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

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its cached prefix and new pages for the rest; False if there are too few."""
        keys = self._prefix_keys(sequence)
        hits = self._known(keys)
        wanted = []
        for group in self.groups:
            first = self._first(group, hits)
            shared = group.pages.cache.match(keys[first:hits])
            wanted.append((group, first, self._end(group, sequence, hits) - hits, shared))
        if not all(group.pages.has(count, shared) for group, _, count, shared in wanted):
            return False
        for group, first, count, shared in wanted:
            _held(group, sequence)[:] = page_row([*[0] * first, *(group.pages.take(count, shared) or ())])
        self.states.admit(sequence, keys[:hits])
        if not sequence.stats.preemptions:
            self._queried_tokens += sequence.pending
            sequence.admitted = monotonic()
        self._hit(sequence, hits)
        return True

    def _prefill_chunks(self) -> list[tuple[Sequence, int]]:
        """Chunks of at most `limits.prefill_chunk` tokens together: the shortest prompt first, of each client's next.

        Every client with a prompt gets a quarter of an equal share at least. A sequence waits one step for a page that
        one before it computes in this step: requests that arrive together compute a shared prefix once. With a
        recurrent state it waits for a snapshot.
        """
        budget, page_size = self._limits.prefill_chunk, self._limits.page_size
        chunks, in_progress = [], set[bytes]()
        prompts = _in_turns([sequence for sequence in self.running if sequence.pending])
        clients = list(dict.fromkeys(sequence.request.client for sequence in prompts))
        least = dict.fromkeys(clients, max(1, budget // (4 * max(1, len(clients)))))
        for sequence in prompts:  # all before the first snapshot: it is not written until the chunks are computed
            self._share(sequence)
        keys_of = [self._prefix_keys(sequence) for sequence in prompts]
        for place, (sequence, keys) in enumerate(zip(prompts, keys_of, strict=True)):
            first, written = divmod(sequence.cached, page_size)
            awaited = keys[first:] if self.states.count else keys[first : first + 1]
            if not written and in_progress.intersection(awaited):
                continue
            share = min(budget, least.pop(sequence.request.client, 0))
            if chunk := min(sequence.pending, max(share, budget - sum(least.values()))):
                chunk = self.states.chunk(sequence, keys, chunk, self.pages.cache, keys_of[place + 1 :])
                chunks.append((sequence, chunk))
                budget -= chunk
                in_progress.update(self.states.useful(keys[first : (sequence.cached + chunk) // page_size]))
        return chunks

    def _share(self, sequence: Sequence) -> None:
        """Exchange pages that are still to be computed for ones that another request has computed since admission."""
        start, rest = divmod(sequence.cached, self._limits.page_size)
        if rest:
            return  # its next page is partly written
        keys = self._prefix_keys(sequence)
        end = self._known(keys, start)
        if end == start:
            return
        for group in self.groups:
            first, held = max(start, self._first(group, end)), _held(group, sequence)
            hits = group.pages.cache.match(keys[first:end])
            group.pages.take(0, hits)
            # Its pages from `start` on are not written: some stay, for the tokens behind the hits.
            surplus = len(held) - start - (self._end(group, sequence, end) - end)
            group.pages.give_back(held[start : start + surplus])
            held[start : start + surplus] = page_row([*[0] * (first - start), *hits])
        self.states.restore(sequence, keys[:end])
        self._hit(sequence, end - start)
        self._free_behind(sequence)

    def _known(self, keys: SequenceOf[bytes], start: int = 0) -> int:
        """Leading pages of a prefix, `start` of which the sequence has, that need not be computed.

        In every group, those of them that the next row sees are cached, and behind them there is a state.
        """
        lacking: int | None = start + len(self.pages.cache.match(keys[start:]))
        while lacking is not None:
            known = self.states.known(keys, start, lacking)
            seen = ((group, range(max(start, self._first(group, known)), known)) for group in self.groups[1:])
            unknown = (i for group, pages in seen for i in reversed(pages) if not group.pages.cache.holds(keys[i]))
            lacking = next(unknown, None)
        return known

    def _first(self, group: PageGroup, pages: int) -> int:
        """The first page that a row behind so many full pages sees."""
        size = self._limits.page_size
        return group.first(pages * size, size)

    def _hit(self, sequence: Sequence, pages: int) -> None:
        """Count pages of the prefix that need not be computed. After a preemption they are not counted as hits."""
        tokens = pages * self._limits.page_size
        sequence.cached += tokens
        sequence.keyed_pages += pages
        if not sequence.stats.preemptions:
            sequence.stats.cached_tokens += tokens
            self._hit_tokens += tokens

    def _prefix_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of the pages that the sequence may take from the cache: full ones before its anchor.

        The anchor is computed by the next step, so a page that a sequence writes to is never a shared one. Without a
        forward pass over the prompt there are no prompt_logprobs: a request that still needs them takes no pages.
        """
        if not self._limits.prefix_cache or sequence.needs_prompt_rows:
            return []
        count = (len(sequence.tokens) - 1) // self._limits.page_size
        self._extend_keys(sequence, count)
        return sequence.page_keys[:count]

    def _cache(self, sequence: Sequence) -> None:
        """Enter the full pages whose K/V has been committed into the cache."""
        if not self._limits.prefix_cache:
            return
        # A step that ended the answer may have committed tokens that were dropped.
        count = min(sequence.cached, len(sequence.tokens)) // self._limits.page_size
        if count <= sequence.keyed_pages:
            return
        self._extend_keys(sequence, count)
        keys = sequence.page_keys
        for group in self.groups:
            held = _held(group, sequence)
            for index in range(sequence.keyed_pages, count):
                if group.pages.cache.add(held[index], keys[index], keys[index - 1] if index else None):
                    self._report_stored(group, sequence, index)
        sequence.keyed_pages = count

    def _report_stored(self, group: PageGroup, sequence: Sequence, index: int) -> None:
        events, size = group.pages.cache.events, self._limits.page_size
        if events is not None:
            keys, tokens = sequence.page_keys, tuple(sequence.tokens[index * size : (index + 1) * size])
            events.append(Stored(keys[index], keys[index - 1] if index else None, tokens, sequence.request.cache_salt))

    def _extend_keys(self, sequence: Sequence, count: int) -> None:
        salt = sequence.request.cache_salt
        extend_keys(sequence.page_keys, sequence.tokens, self._limits.page_size, count, salt)

    def _settle(self) -> None:
        """Cache the pages that are full, and give back those behind the window."""
        for sequence in self.running:
            self._cache(sequence)
            self._free_behind(sequence)

    def _free_behind(self, sequence: Sequence) -> None:
        """Give back pages that no further row of the sequence sees."""
        for group in self.groups[1:]:
            held, end = _held(group, sequence), group.first(sequence.cached, self._limits.page_size)
            start = end
            while start and held[start - 1]:
                start -= 1
            group.pages.give_back(held[start:end])
            held[start:end] = page_row([0] * (end - start))

    def _end(self, group: PageGroup, sequence: Sequence, cached_pages: int = 0) -> int:
        """End of the pages for its tokens and those that the launched steps and another one can commit.

        With a window they are taken as the context grows: up to the next chunk of a prompt.
        """
        request, steps, tokens = sequence.request, 1 + sequence.launched, len(sequence.tokens) - 1
        if group.window is not None:
            cached = max(sequence.cached, cached_pages * self._limits.page_size)
            tokens = min(tokens, cached + self._limits.prefill_chunk)
        last = len(request.prompt) + request.max_new_tokens - 1  # an answer that is complete commits nothing more
        return self._limits.pages_for(min(tokens + steps * self._growth, last + self._growth))

    def _missing(self, group: PageGroup, sequence: Sequence) -> int:
        return max(0, self._end(group, sequence) - len(_held(group, sequence)))

    def _grow(self, sequence: Sequence) -> None:
        """Allocate pages for the tokens a step can commit; preempts the last sequences, at worst this one."""
        missing = [(group, self._missing(group, sequence)) for group in self.groups]
        while any(count for _, count in missing):
            if all(group.pages.has(count) for group, count in missing):
                for group, count in missing:
                    _held(group, sequence).extend(group.pages.take(count) or ())
                return
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        """Free the pages and queue the sequence again; what is evicted of its context is recomputed from its tokens."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.cached = 0
        sequence.stats.preemptions += 1
        self._preemptions += 1
        insort(self.waiting, sequence, key=_rank)

    def _release(self, sequence: Sequence) -> None:
        self._cache(sequence)
        for group in self.groups:
            held = _held(group, sequence)
            group.pages.give_back([page for page in held if page])
            del held[:]
        self.states.release(sequence)
        sequence.keyed_pages, sequence.counts = 0, None
        sequence.injected.clear()


def _held(group: PageGroup, sequence: Sequence) -> array[int]:
    """The pages of a sequence in a group."""
    return sequence.pages if group.window is None else sequence.windowed_pages


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
