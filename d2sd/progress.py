"""Progress of long work. The CLI draws bars; libraries and tests stay silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """`with progress("hashing", total_bytes) as advance: advance(n)`; total None if it is unknown."""

    def __call__(self, what: str, total: int | None = None) -> AbstractContextManager[Callable[[int], None]]: ...


@contextmanager
def silent(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show nothing."""
    del what, total
    yield lambda count: None


@contextmanager
def bar(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Draw a transient bar on stderr (`d2sd.progress.Progress`), if it is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
