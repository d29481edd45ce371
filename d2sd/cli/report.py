"""How a command tells of errors and of long work. Everything goes to stderr: stdout is for results."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from d2sd.errors import D2SDError


class Reporting(click.Command):
    """A command whose user errors are a message and exit code 2, and whose interruption is exit code 130."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, turning the errors a user can cause into a message."""
        try:
            return super().invoke(ctx)
        except D2SDError as error:
            click.echo(f"error: {error}", err=True)
        except OSError as error:  # permissions, a read-only disk
            if error.errno == errno.EPIPE:
                raise  # click knows
            click.echo(f"error: {error.strerror or error}\n  where: {error.filename}", err=True)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)
        ctx.exit(2)


class ReportingGroup(Reporting, click.Group):
    """The same for a group."""


@contextmanager
def bar(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Draw a bar while work runs (`d2sd.convert.progress.Progress`); nothing remains of it, and none off a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
