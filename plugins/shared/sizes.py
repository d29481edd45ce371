"""Sizes that a launch rounds. Does not import Triton."""

from __future__ import annotations


def power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
