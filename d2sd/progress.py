"""Progress of long work. The CLI draws bars; libraries and tests stay silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """`with progress("hashing", total_bytes) as advance: advance(n)`; without a total where it cannot be known."""

    def __call__(self, what: str, total: int | None = None) -> AbstractContextManager[Callable[[int], None]]: ...


@contextmanager
def silent(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show nothing."""
    del what, total
    yield lambda count: None


@contextmanager
def bar(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Draw a bar while work runs (`d2sd.progress.Progress`); nothing remains of it, and none off a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
