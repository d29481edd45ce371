"""Allocator of K/V pages, shared by the target and both drafters, whose pools hold the same tokens."""

from __future__ import annotations


class PageAllocator:
    """Allocates page numbers 1 .. count - 1; page 0 is the scratch page that padding is written to."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, 0, -1))  # low numbers first: easier to read in a debugger

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) if there are fewer."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))
