"""Progress of long work. The CLI draws bars; libraries and tests stay silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import IO, Protocol

#: Between two lines of a log.
_SECONDS_A_LINE = 60.0


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
    """Draw a transient bar on stderr (`d2sd.progress.Progress`); in a log, write a line a minute."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(what, total, console.file)
        return
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def _lines(what: str, total: int | None, file: IO[str]) -> Callable[[int], None]:
    """Return an `advance` that says once a minute how far the work is: short work writes nothing to a log."""
    began = said = monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, said
        done, now = done + count, monotonic()
        if now < said + _SECONDS_A_LINE or not done:
            return
        said = now
        minutes = (now - began) / 60
        far = f"{done / total:.0%}, {minutes * (total / done - 1):.0f} min left" if total else f"{done:,}"
        file.write(f"{what}: {far}, {minutes:.0f} min so far\n")
        file.flush()

    return advance
