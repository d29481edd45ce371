"""Slots of recurrent state: one a running request, and snapshots with which a cached prefix can be continued.

A layer with a recurrent state (a gated delta rule, a short convolution) needs, besides the pages of the attention
layers, the state behind the last token, and no state can be cut back to fewer tokens. So a cached prefix is of use only
up to a place where the state was copied: a *snapshot*, in a slot of the same pool, under the key of the prefix's last
page. Snapshots are idle pages in the words of `PageAllocator`: the least recently used one is evicted for a request
that starts, or for a newer snapshot.

Snapshots are taken where further requests may leave a prompt (Marconi, arXiv 2411.19379): at its last full page, where
requests part whose pages are cached or that wait for it, and at the chunk ends of long prompts.

Slot 0 is the state of no tokens: it is never written, and padding reads it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from d2sd.runtime.pages import PageAllocator, PrefixCache
from d2sd.runtime.sequence import Sequence

#: From slot, to slot.
Copy = tuple[int, int]


class StateSlots:
    """Gives slots to requests and snapshots, and lists the copies that a step makes. Without slots it does nothing."""

    def __init__(self, count: int, max_batch: int, page_size: int) -> None:
        """Slots 0 .. count - 1, at least one for each of max_batch requests and slot 0; or none at all."""
        assert count == 0 or count > max_batch
        self.count, self._page_size = count, page_size
        self._pool = PageAllocator(count)
        self._restored: dict[int, int] = {}  # to slot -> from slot
        self._snapshots: list[Copy] = []

    @property
    def used(self) -> int:
        """Slots of running requests."""
        return self._pool.used

    @property
    def cached(self) -> int:
        """Snapshots."""
        return len(self._pool.cache.idle)

    def take_copies(self) -> tuple[list[Copy], list[Copy]]:
        """The copies before the prefill of a step, and those between it and the decode step; each in order.

        No slot is copied to twice before the prefill, and none is read there after it is written.
        """
        self._pool.take_discarded()  # of no use here: a slot is overwritten before it is read
        copies = [(source, slot) for slot, source in self._restored.items()], self._snapshots
        self._restored, self._snapshots = {}, []
        return copies

    def admit(self, sequence: Sequence, keys: SequenceOf[bytes]) -> None:
        """Give a request a slot with the state behind a prefix, whose snapshot there is: `keys` are those of its pages.

        A step that was launched before may still commit to the slot, for a request that has ended since: the copy is
        later on the same stream, so it is what stays.
        """
        if not self.count:
            return
        snapshot = self._pool.cache.match(keys[-1:])
        taken = self._pool.take(1, snapshot)
        if taken is None:  # the snapshot is in the last slot: from now on it is the request's own
            taken, snapshot = self._pool.take(1), []
            assert taken is not None
        else:
            self._restored[taken[-1]] = snapshot[0] if snapshot else 0
        sequence.state_id = taken[-1]
        self._pool.give_back(snapshot)  # it was kept from eviction, and is the last to be evicted now

    def restore(self, sequence: Sequence, keys: SequenceOf[bytes]) -> None:
        """Put the state behind a prefix into the slot of a running request, as in `admit`."""
        if self.count:
            snapshot = self._pool.cache.match(keys[-1:])
            self._restored[sequence.state_id] = snapshot[0]
            self._pool.take(0, snapshot)
            self._pool.give_back(snapshot)

    def release(self, sequence: Sequence) -> None:
        """Take the slot of a request that ends or is preempted."""
        if self.count:
            self._restored.pop(sequence.state_id, None)
            self._pool.give_back([sequence.state_id])
            sequence.state_id = 0

    def known(self, keys: SequenceOf[bytes], start: int, end: int) -> int:
        """The most pages of a prefix, from `end` down to `start`, behind which there is a state."""
        if not self.count:
            return end
        return next((pages for pages in range(end, start, -1) if self._pool.cache.holds(keys[pages - 1])), start)

    def useful(self, keys: SequenceOf[bytes]) -> SequenceOf[bytes]:
        """Choose the pages with these keys behind which there is a state; all of them without recurrent layers."""
        return [key for key in keys if self._pool.cache.holds(key)] if self.count else keys

    def chunk(
        self,
        sequence: Sequence,
        keys: SequenceOf[bytes],
        most: int,
        pages: PrefixCache,
        others: SequenceOf[SequenceOf[bytes]],
    ) -> int:
        """Tokens of a prompt's next chunk, `most` or fewer; lists the snapshot that is taken behind it, if any is.

        `keys` are those of the prompt's full pages, `others` the same of prompts that are computed after it, and
        `pages` the index of all pages.
        """
        if not self.count or not keys or not self._has_room:
            return most
        count = self._cut(sequence, keys, most, [*_branches(keys, sequence, pages, self._page_size, others), len(keys)])
        full, rest = divmod(sequence.cached + count, self._page_size)
        if not rest and full and not self._pool.cache.holds(keys[full - 1]):
            taken = self._pool.take(1)
            assert taken is not None
            self._pool.cache.add(taken[0], keys[full - 1])
            self._pool.give_back(taken)
            self._snapshots.append((sequence.state_id, taken[0]))
        return count

    def _cut(self, sequence: Sequence, keys: SequenceOf[bytes], most: int, places: Iterable[int]) -> int:
        """Tokens up to the first of these numbers of pages that lacks a snapshot, else to a full page if it goes on."""
        size, cached = self._page_size, sequence.cached
        within = [pages for pages in places if cached < pages * size <= cached + most]
        lacking = [pages for pages in within if not self._pool.cache.holds(keys[pages - 1])]
        if lacking:
            return min(lacking) * size - cached
        whole = (cached + most) // size * size - cached
        return whole if most < sequence.pending and whole > 0 else most

    @property
    def _has_room(self) -> bool:
        """Whether there is a slot for a snapshot besides those that this step writes."""
        return self._pool.free > len(self._snapshots)


def _branches(
    keys: SequenceOf[bytes],
    sequence: Sequence,
    pages: PrefixCache,
    page_size: int,
    others: SequenceOf[SequenceOf[bytes]],
) -> list[int]:
    """Numbers of leading pages behind which a prompt parts from cached text, and from others that are computed later.

    Of the others the one that has most in common with it. Cached text that only ends there, as an answer does that a
    next turn continues, parts from nothing.
    """
    first = sequence.cached // page_size
    known = first + len(pages.match(keys[first:]))
    parts = known > first and pages.continues(keys[known - 1])
    return [*[known] * parts, max((_common(keys, other) for other in others), default=0)]


def _common(keys: SequenceOf[bytes], others: SequenceOf[bytes]) -> int:
    """Leading keys in common. A key names all pages before it, so behind the first that differs all do."""
    return bisect_left(range(min(len(keys), len(others))), True, key=lambda index: keys[index] != others[index])
