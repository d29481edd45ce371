"""JSON lines appended by several processes at once: each writes its own file, so lines are never interleaved.

An interruption leaves at most one incomplete line, at the end of a file. Readers skip it, and the file's next writer
truncates it, so its prompt is run again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO, TypeVar

from pydantic import BaseModel, ConfigDict

from d2sd.errors import D2SDError
from d2sd.io import parse_json
from d2sd.schema import Schema, validated


class Named(BaseModel):
    """A line with an id."""

    model_config = ConfigDict(strict=True)

    id: str


Row = TypeVar("Row", bound=Named)


def own_file(folder: Path, kind: str, rank: int) -> Path:
    """The file that this rank appends to: `kind.jsonl` for rank 0, `kind-1.jsonl` for rank 1, ..."""
    return folder / (f"{kind}-{rank}.jsonl" if rank else f"{kind}.jsonl")


def files(path: Path, kind: str) -> list[Path]:
    """`path` if it is a file; for a folder, the files of every rank, also of an earlier run with more ranks."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.glob(f"{kind}*.jsonl") if re.fullmatch(rf"{kind}(-\d+)?\.jsonl", file.name))


def whole_lines(path: Path) -> list[bytes]:
    """The complete lines of a file, without an incomplete last one; empty if the file does not exist."""
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def read_rows(path: Path, kind: str, row_type: type[Row]) -> Iterator[tuple[str, Row]]:
    """("file:line", row) of every complete line of `files(path, kind)`; nothing if there are no files.

    Raises D2SDError naming file and line for a line that is not a valid `row_type`, and for a repeated id.
    """
    seen: dict[str, str] = {}
    for file in files(path, kind):
        for number, line in enumerate(whole_lines(file), 1):
            where = f"{file}:{number}"
            row = parse_row(row_type, line, where, f"not one of the {kind}")
            if row.id in seen:
                raise D2SDError(
                    f"the same id twice among the {kind}",
                    where=where,
                    found=f"{row.id}, also at {seen[row.id]}",
                    fix="delete one of both lines; run one training at a time in a work folder",
                )
            seen[row.id] = where
            yield where, row


def parse_row(row_type: type[Schema], line: bytes, where: str, what: str) -> Schema:
    """Parse one line as a `row_type`. Raises D2SDError `what` with `where`, the line, and its first invalid key."""
    fix = "delete the line, or restore the file"
    try:
        values = parse_json(line.decode("utf-8"))
    except ValueError as fault:
        raise D2SDError(what, where=where, found=fault, fix=fix) from None
    return validated(row_type, values, where, error=D2SDError, what=what, fix=fix)


def append_to(path: Path) -> TextIO:
    """Open `path` for appending; an incomplete last line is truncated first."""
    if path.is_file():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


def append_row(out: TextIO, row: Mapping[str, object]) -> None:
    """Write one line and flush it to the operating system."""
    out.write(json.dumps(dict(row)) + "\n")
    out.flush()
