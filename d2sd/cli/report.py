"""How a command tells of errors and of long work. Everything goes to stderr: stdout is for results."""

from __future__ import annotations

import errno
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
