"""Chooses by the names of parameters what runs at every change, so that a new policy changes nothing for the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar
from zlib import crc32

Named = TypeVar("Named")


def stable_hash(*names: object) -> int:
    """The same in every process and version of Python."""
    return crc32("/".join(map(str, names)).encode())


def chosen(policy: str, options: Iterable[Named], count: int = 1) -> list[Named]:
    """`count` of the options, in an order that depends on the names alone."""
    return sorted(options, key=lambda option: stable_hash(policy, option))[:count]
