"""What long work tells its caller. The CLI draws bars; libraries and tests stay silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """`with progress("hashing", total_bytes) as advance: advance(n)`; no total means that nobody can know it."""

    def __call__(self, what: str, total: int | None = None) -> AbstractContextManager[Callable[[int], None]]: ...


@contextmanager
def silent(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Report to nobody."""
    del what, total
    yield lambda count: None
