"""JSON lines that several processes append to at once: each to a file of its own, so none tears another's line.

An interruption leaves at most one cut line, the last of a file. Readers leave it out, and the file's next writer cuts
it off, so its prompt is run again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO, TypeVar

from pydantic import BaseModel

from d2sd.errors import D2SDError
from d2sd.io import parse_json
from d2sd.schema import Schema, validated


class Named(BaseModel):
    """Anything with an id: one line."""

    id: str


Row = TypeVar("Row", bound=Named)


def own_file(folder: Path, kind: str, rank: int) -> Path:
    """The file that the process of this rank appends to: `kind.jsonl` for the first, `kind-1.jsonl` for the next."""
    return folder / (f"{kind}-{rank}.jsonl" if rank else f"{kind}.jsonl")


def files(path: Path, kind: str) -> list[Path]:
    """`path` if it is a file; of a folder the files of every rank, those of an earlier run with more of them too."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.glob(f"{kind}*.jsonl") if re.fullmatch(rf"{kind}(-\d+)?\.jsonl", file.name))


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file without one cut short, the last; none where there is no file."""
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def read_rows(path: Path, kind: str, row_type: type[Row]) -> Iterator[tuple[str, Row]]:
    """("file:line", row) of every whole line of `files(path, kind)`; nothing where there is no file.

    Raises D2SDError naming file and line for a line that is no `row_type`, and for an id that an earlier line has.
    """
    seen: dict[str, str] = {}
    for file in files(path, kind):
        for number, line in enumerate(whole_lines(file), 1):
            where = f"{file}:{number}"
            row = parse_row(row_type, line, where, f"not one of the {kind}")
            if row.id in seen:
                raise D2SDError(
                    f"the same id twice among the {kind}", where=where, found=f"{row.id}, also at {seen[row.id]}",
                    fix="delete one of both lines; run one training at a time in a work folder",
                )  # fmt: skip
            seen[row.id] = where
            yield where, row


def parse_row(row_type: type[Schema], line: bytes, where: str, what: str) -> Schema:
    """One line as a `row_type`. Raises D2SDError `what`, naming `where`, the line, and its first bad key."""
    fix = "delete the line, or restore the file"
    try:
        values = parse_json(line.decode("utf-8"))
    except ValueError as fault:
        raise D2SDError(what, where=where, found=fault, fix=fix) from None
    return validated(row_type, values, where, error=D2SDError, what=what, fix=fix)


def append_to(path: Path) -> TextIO:
    """Open `path` to append lines to it, after its last whole one."""
    if path.is_file():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


def append_row(out: TextIO, row: Mapping[str, object]) -> None:
    """Write one line and flush it to the operating system."""
    out.write(json.dumps(dict(row)) + "\n")
    out.flush()
