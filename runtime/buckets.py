"""Buckets: the few sizes that shapes are padded to. No torch: engine profiles use them too."""

from __future__ import annotations


def bucket(count: int) -> int:
    """The next power of two: few shapes to compile or capture, at most half of the work on padding."""
    return 1 << (count - 1).bit_length()


def buckets(max_count: int) -> list[int]:
    """Every bucket up to the first of at least `max_count`: 1, 2, 4, …"""
    return [1 << power for power in range((max_count - 1).bit_length() + 1)]


def floor_bucket(count: int) -> int:
    """The largest power of two that is not above `count`."""
    return 1 << (count.bit_length() - 1)
