"""JSON lines that several processes append to at once: each to a file of its own, so none tears another's line.

An interruption leaves at most one cut line, the last of a file. Readers leave it out, and the file's next writer cuts
it off, so it is asked again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TextIO, TypeVar

from d2sd.errors import D2SDError


class Named(Protocol):
    """Anything with an id: one line."""

    @property
    def id(self) -> str: ...


Row = TypeVar("Row", bound=Named)


def own_file(folder: Path, kind: str, rank: int) -> Path:
    """The file that the process of this rank appends to: `kind.jsonl` for the first, `kind-1.jsonl` for the next."""
    return folder / (f"{kind}-{rank}.jsonl" if rank else f"{kind}.jsonl")


def files(path: Path, kind: str) -> list[Path]:
    """`path` if it is a file; of a folder the files of every rank, those of an earlier run with more of them too."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.glob(f"{kind}*.jsonl") if re.fullmatch(rf"{kind}(-\d+)?\.jsonl", file.name))


def read_rows(path: Path, kind: str, parse: Callable[[object], Row], expected: str) -> Iterator[tuple[str, Row]]:
    """("file:line", row) of every whole line of `files(path, kind)`; nothing where there is no file.

    `parse` raises ValueError, KeyError or TypeError for a line that is no such row. Raises D2SDError naming file and
    line for it, and for an id that an earlier line has.
    """
    seen: dict[str, str] = {}
    for file in files(path, kind):
        for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):  # what follows the last \n is cut
            where = f"{file}:{number}"
            try:
                row = parse(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise D2SDError(f"not one of the {kind}", where=where, found=repr(error), expected=expected) from None
            if row.id in seen:
                raise D2SDError(
                    f"the same id twice among the {kind}", where=where, found=f"{row.id}, also at {seen[row.id]}",
                    fix="delete one of both lines; run one training at a time in a work folder",
                )  # fmt: skip
            seen[row.id] = where
            yield where, row


def text(value: object) -> str:
    """`value`, if it is a string. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no string")
    return value


def append_to(path: Path) -> TextIO:
    """Open `path` to append lines to it, behind its last whole one."""
    if path.is_file():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


def append_row(out: TextIO, row: Mapping[str, object]) -> None:
    """Write one line and make sure that it is on its way to the disk."""
    out.write(json.dumps(dict(row)) + "\n")
    out.flush()
