"""Allocator of K/V pages, shared by the target and both drafters, whose pools hold the same tokens.

A page is free, or used by one or more requests (reference counted), or idle: cached, used by no request, and available
once it is evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from d2sd.runtime.prefix_cache import PrefixCache


class PageAllocator:
    """Allocates page numbers 1 .. count - 1; page 0 is the scratch page that padding is written to."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.cache = PrefixCache()
        self._free = list(range(count - 1, 0, -1))  # low numbers first: easier to read in a debugger
        self._references: Counter[int] = Counter()
        self._discarded: list[int] = []

    @property
    def free(self) -> int:
        """Pages that no request uses, idle ones included."""
        return len(self._free) + self.cache.idle

    @property
    def used(self) -> int:
        return len(self._references)

    def take(self, count: int, shared: Sequence[int] = ()) -> list[int] | None:
        """The cached pages `shared` and `count` others, or None (and nothing taken) if there are too few.

        Pages that are not cached are taken first, then idle ones are evicted.
        """
        available = self.free - sum(self.cache.is_idle(page) for page in shared)
        if count > available:
            return None
        for page in shared:
            if self.cache.is_idle(page):
                self.cache.unpark(page)
        new = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._references.update([*shared, *new])
        return [*shared, *new]

    def give_back(self, pages: Sequence[int]) -> None:
        """Drop one reference to each of a request's pages. Cached ones stay; the last page is the first to be evicted,
        because the pages of a prefix are of no use without those before them.
        """
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            del self._references[page]
            if page in self.cache:
                self.cache.park(page)
            else:
                self._free.append(page)
                self._discarded.append(page)

    def take_discarded(self) -> list[int]:
        """Pages whose K/V was given up since the last call: returned without being cached, or evicted."""
        discarded, self._discarded = self._discarded, []
        return discarded

    def _evict(self) -> int:
        page = self.cache.evict()
        self._discarded.append(page)
        return page
