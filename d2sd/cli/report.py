"""How a command ends: results on stdout, messages on stderr, and exit codes for user errors and internal errors."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Any

import click

from d2sd.errors import CLI, D2SDError
from d2sd.interrupts import noting_interrupts
from d2sd.io import printable
from d2sd.logs import show_warnings

#: Exit codes: the user's input or machine, a bug in d2sd (EX_SOFTWARE), Ctrl-C.
USER_ERROR, INTERNAL_ERROR, INTERRUPTED = 2, 70, 130
#: How to end an error of the system, by its number.
_FIXES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, and run again")
_FIXES |= {errno.EFBIG: "raise the limit of file sizes, `ulimit -f`"}


class Reporting(click.Command):
    """A command that never ends in a traceback.

    Exit codes: 2 for user errors, 70 for bugs in d2sd (D2SD_DEBUG=1 shows the traceback), 130 for Ctrl-C.
    """

    def __init__(self, *args: Any, **attrs: Any) -> None:
        attrs.setdefault("context_settings", {"help_option_names": ["-h", "--help"]})
        super().__init__(*args, **attrs)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command and, if `standalone_mode`, exit the process, as `click.Command.main` does."""
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode, a path that is not text
        if not extra.get("standalone_mode", True):
            return super().main(*args, **extra)
        show_warnings()
        with noting_interrupts() as interrupted:
            try:
                code = super().main(*args, **extra | {"standalone_mode": False}) or 0
                sys.stdout.flush()
            except BaseException as error:
                if isinstance(error, SystemExit):
                    raise
                code = report(KeyboardInterrupt() if interrupted() else error)
        sys.exit(code)


class ReportingGroup(Reporting, click.Group):
    """A group whose commands report as `Reporting` does."""


def report(error: BaseException) -> int:
    """Print a message about `error` and return the exit code."""
    if isinstance(error, click.Abort):  # click's name for Ctrl-C, and for the end of a file
        error = error.__cause__ or error
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    if isinstance(error, D2SDError):
        click.echo(f"error: {printable(error.told(CLI))}", err=True)
        return USER_ERROR
    if isinstance(error, OSError):  # permissions, a full disk; those of libraries in Rust have no number
        place = f"\n  where: {error.filename}" if error.filename is not None else ""
        fix = f"\n  fix: {_FIXES[error.errno]}" if error.errno in _FIXES else ""
        what = error.strerror or str(error)[:500] or type(error).__name__
        click.echo(f"error: {printable(f'{what}{place}{fix}')}", err=True)
        _drop_output()
        return USER_ERROR
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
        click.echo(f"error: Out of memory.\n  found: {printable(error)}\n  fix: lower limits.max_batch", err=True)
        return USER_ERROR
    if os.environ.get("D2SD_DEBUG") == "1":
        traceback.print_exception(error)
    click.echo(
        f"internal error: {printable(f'{type(error).__name__}: {error}'[:500])}\n"
        "  This is a bug in d2sd: please report it with the command that you ran.\n"
        "  D2SD_DEBUG=1 shows where it happened.",
        err=True,
    )
    return INTERNAL_ERROR


def _drop_output() -> None:
    """Discard buffered results if stdout cannot be written, or Python would fail again when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
