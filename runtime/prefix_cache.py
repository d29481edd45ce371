"""The index of the prefix cache: which full pages hold the K/V of which prefix, and which of them to evict first.

A page's key is a hash chained over token ids: of the key of the page before it and of its own tokens. So a key names
the whole prefix, positions included, and equal keys mean equal K/V: models, dtype and page size are fixed in an engine,
and its K/V depends on nothing else. A request's `cache_salt` starts the chain, which keeps tenants apart. Keys are
256-bit BLAKE2b digests, so that no prompt can be made to collide with another.

K/V of the same tokens differs in its last bits with the chunks that a prompt was computed in, because sums are taken in
another order. A hit is one more such order: fp32 tokens stay the same, as they do for any `limits.prefill_chunk`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


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
        self._idle: OrderedDict[int, None] = OrderedDict()  # the next to evict first
        #: What entered and left the cache, in order, for a router of requests. None: not recorded.
        self.events: deque[Stored | Removed] | None = None

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    @property
    def idle(self) -> int:
        """Number of idle pages."""
        return len(self._idle)

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the leading keys, up to the first unknown one."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def add(self, page: int, key: bytes) -> bool:
        """Record that `page`, used by a request, holds this prefix. False: another page does already, and stays."""
        if key in self._page_of:
            return False
        self._page_of[key], self._key_of[page] = page, key
        return True

    def park(self, page: int) -> None:
        """The last request that used a cached page has left: it is idle, and the last to be evicted."""
        self._idle[page] = None

    def unpark(self, page: int) -> None:
        """A request uses an idle page again."""
        del self._idle[page]

    def evict(self) -> int:
        """Remove the least recently used idle page from the index."""
        page, _ = self._idle.popitem(last=False)
        key = self._key_of.pop(page)
        del self._page_of[key]
        if self.events is not None:
            self.events.append(Removed(key))
        return page
