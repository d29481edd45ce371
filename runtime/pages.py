"""Allocator of K/V pages, shared by the target and both drafters, whose pools hold the same tokens.

Layers that see all tokens before them are one group, those with a window the other: each has an allocator and page
numbers of its own, because the pages of a request behind the window are freed.

A page is free, or used by one or more requests (reference counted), or idle: cached, used by no request, and available
once it is evicted. The index of the prefix cache says which full pages hold the K/V of which prefix, and which of them
to evict first.

A page's key is a hash chained over token ids: of the key of the page before it and of its own tokens. So a key names
the whole prefix, positions included, and equal keys mean equal K/V: models, dtype and page size are fixed in an engine,
and its K/V depends on nothing else. A request's `cache_salt` starts the chain, which keeps tenants apart. Keys are
256-bit BLAKE2b digests, so that no prompt can be made to collide with another.

K/V of the same tokens differs in its last bits with the chunks that a prompt was computed in, because sums are taken in
another order. A hit is one more such order: fp32 tokens stay the same, as they do for any `limits.prefill_chunk`.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b


def page_row(pages: Iterable[int] = ()) -> array[int]:
    """A request's row of a page table: numbers as a table has them, so that it takes them at the speed of memory."""
    return array("q", pages)


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
        return len(self._free) + len(self.cache.idle)

    @property
    def used(self) -> int:
        return len(self._references)

    def take(self, count: int, shared: Sequence[int] = ()) -> list[int] | None:
        """The cached pages `shared` and `count` others, or None (and nothing taken) if there are too few.

        Pages that are not cached are taken first, then idle ones are evicted.
        """
        if not self.has(count, shared):
            return None
        for page in shared:
            if page in self.cache.idle:
                del self.cache.idle[page]
        new = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._references.update([*shared, *new])
        return [*shared, *new]

    def has(self, count: int, shared: Sequence[int] = ()) -> bool:
        """Whether there are `count` pages besides the cached ones `shared`."""
        return count <= self.free - sum(page in self.cache.idle for page in shared)

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
                self.cache.idle[page] = None
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


@dataclass(frozen=True, slots=True)
class PageGroup:
    """The pages of layers that have one page table."""

    pages: PageAllocator
    window: int | None = None  # the largest of these layers; None: they see all tokens before them

    def first(self, committed: int, page_size: int) -> int:
        """The first page that a row behind `committed` tokens sees; those before it may be freed."""
        return 0 if self.window is None else max(0, committed - self.window + 1) // page_size


def extend_keys(keys: list[bytes], tokens: Sequence[int], page_size: int, count: int, salt: str) -> None:
    """Append the keys of further pages of `tokens` until there are `count`. The tokens must fill these pages."""
    assert count * page_size <= len(tokens)
    while len(keys) < count:
        parent = keys[-1] if keys else blake2b(salt.encode(), digest_size=32).digest()
        page = array("q", tokens[len(keys) * page_size : (len(keys) + 1) * page_size])
        keys.append(blake2b(parent + page.tobytes(), digest_size=32).digest())


@dataclass(frozen=True, slots=True)
class Stored:
    """A page entered the cache."""

    key: bytes
    parent: bytes | None  # key of the page before it
    tokens: tuple[int, ...]  # of this page
    salt: str


@dataclass(frozen=True, slots=True)
class Removed:
    """A page was evicted."""

    key: bytes


class PrefixCache:
    """Maps keys to pages. An *idle* page is used by no request, and can be evicted: least recently used first."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._parent_of: dict[int, bytes | None] = {}  # key of the page before it
        self._followers: Counter[bytes | None] = Counter()  # of a key: cached pages right behind its page
        self.idle: OrderedDict[int, None] = OrderedDict()  # the next to evict first
        #: What entered and left the cache, in order, for a router of requests. None: not recorded.
        self.events: deque[Stored | Removed] | None = None

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    def holds(self, key: bytes) -> bool:
        """Whether a page of this key is cached."""
        return key in self._page_of

    def continues(self, key: bytes) -> bool:
        """Whether a page right behind that of this key is cached."""
        return key in self._followers

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the leading keys, up to the first unknown one."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def add(self, page: int, key: bytes, parent: bytes | None = None) -> bool:
        """Record that `page`, used by a request, holds this prefix. False: another page does already, and stays.

        `parent` is the key of the page before it, if there is one.
        """
        if key in self._page_of:
            return False
        self._page_of[key], self._key_of[page], self._parent_of[page] = page, key, parent
        self._followers[parent] += 1
        return True

    def evict(self) -> int:
        """Remove the least recently used idle page from the index."""
        page, _ = self.idle.popitem(last=False)
        key = self._key_of.pop(page)
        del self._page_of[key]
        parent = self._parent_of.pop(page)
        self._followers[parent] -= 1
        if not self._followers[parent]:
            del self._followers[parent]
        if self.events is not None:
            self.events.append(Removed(key))
        return page
