"""A file is written whole or not at all, and whether it can be is known before the work begins."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_writable(path: Path) -> None:
    """Raise the OSError that writing `path` would end in, naming it."""
    with _naming(path):
        if _special(path):
            return
        partial = _partial(path)
        partial.touch()
        partial.unlink()


def write_whole(path: Path, text: str) -> None:
    """Write through a neighbour that then takes the name: readers see the old file or the new one."""
    with _naming(path):
        if _special(path):
            path.write_text(text, "utf-8")
            return
        partial = _partial(path)
        try:
            partial.write_text(text, "utf-8")
            partial.replace(path.resolve())
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _special(path: Path) -> bool:
    """A pipe or a terminal, which a rename would replace. Raises IsADirectoryError for a folder."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return path.exists() and not path.is_file()


def _partial(path: Path) -> Path:
    target = path.resolve()  # a link stays a link
    return target.with_name(f"{target.name}.{os.getpid()}.partial")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error names the file that was asked for, not its neighbour."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
