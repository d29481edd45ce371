"""Prompt lookup: what followed the last time the text ended like this. Free, so every drafter must beat it."""

from __future__ import annotations

#: Longest suffix first: it is the likeliest to go on the same way.
SUFFIXES = (3, 2, 1)


def lookup(tokens: list[int], count: int) -> list[int]:
    """`count` tokens that followed the last earlier occurrence of the longest suffix of at most 3 tokens, or none."""
    for size in SUFFIXES:
        suffix = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == suffix:
                copied = list(tokens)
                for place in range(start + size, start + size + count):
                    copied.append(copied[place])  # past the end it copies itself: what repeats goes on repeating
                return copied[len(tokens) :]
    return []
