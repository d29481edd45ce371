"""Pages and recurrent states of requests, and the prefix cache through which requests share them.

A request starts with the cached pages of its longest known prefix. Layers with a window have pages of their own
(`PageGroup`). Once tokens are committed, the pages that no further row sees are given back; a step that is launched and
not collected sees none of them either. A prefix is known as far as the pages that its next row sees are cached.

Layers with a recurrent state have a slot a request (`StateSlots`); a prefix is known as far as there is a snapshot.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from time import monotonic

from d2sd.errors import RequestError
from d2sd.runtime.pages import PageAllocator, PageGroup, Stored, extend_keys, page_row
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.states import StateSlots


class KVCacheManager:
    """Owns the page numbers and state slots of an engine's pools; uses no tensors."""

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
        self.queried_tokens = self.hit_tokens = 0  # of prompts, since the start

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

    def admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its cached prefix and new pages for the rest; False if there are too few."""
        keys = self.prefix_keys(sequence)
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
            self.queried_tokens += sequence.pending
            sequence.admitted = monotonic()
        self._hit(sequence, hits)
        return True

    def share(self, sequence: Sequence) -> None:
        """Exchange pages that are still to be computed for ones that another request has computed since admission."""
        start, rest = divmod(sequence.cached, self._limits.page_size)
        if rest:
            return  # its next page is partly written
        keys = self.prefix_keys(sequence)
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

    def settle(self, running: Iterable[Sequence]) -> None:
        """Cache the pages that are full, and give back those behind the window."""
        for sequence in running:
            self._cache(sequence)
            self._free_behind(sequence)

    def has_pages(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether there are pages for one more step of all these, whatever the launched ones commit."""
        missing = ((group, sum(self._missing(group, s) for s in sequences)) for group in self.groups)
        return all(group.pages.has(count) for group, count in missing)

    def grow(self, sequence: Sequence) -> bool:
        """Allocate pages for the tokens that a step can commit; False, and none, if there are too few."""
        if not self.has_pages([sequence]):
            return False
        for group in self.groups:
            if count := self._missing(group, sequence):
                _held(group, sequence).extend(group.pages.take(count) or ())
        return True

    def release(self, sequence: Sequence) -> None:
        """Free all that a sequence holds; its full pages stay cached until they are evicted."""
        self._cache(sequence)
        for group in self.groups:
            held = _held(group, sequence)
            group.pages.give_back([page for page in held if page])
            del held[:]
        self.states.release(sequence)
        sequence.keyed_pages, sequence.counts = 0, None
        sequence.injected.clear()

    def prefix_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of the pages that the sequence may take from the cache: full ones before its anchor.

        The anchor is computed by the next step, so a page that a sequence writes to is never a shared one. Without a
        forward pass over the prompt there are no prompt_logprobs: a request that still needs them takes no pages.
        """
        if not self._limits.prefix_cache or sequence.needs_prompt_rows:
            return []
        count = (len(sequence.tokens) - 1) // self._limits.page_size
        self._extend_keys(sequence, count)
        return sequence.page_keys[:count]

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
            self.hit_tokens += tokens

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


def _held(group: PageGroup, sequence: Sequence) -> array[int]:
    """The pages of a sequence in a group."""
    return sequence.pages if group.window is None else sequence.windowed_pages
