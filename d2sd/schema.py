"""Pydantic models filled from files; every mismatch is a `D2SDError` that names file and key."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from d2sd.errors import D2SDError, shortened
from d2sd.io import MAX_BYTES, read_json

Schema = TypeVar("Schema", bound=BaseModel)
#: Faults of one file that are listed; the others are counted.
_MOST = 10


def read_model(
    schema: type[Schema], path: Path, *, error: type[D2SDError], fix: str | None = None, max_bytes: int = MAX_BYTES
) -> Schema:
    """Read a JSON file into `schema`. Raises `error` naming file and key."""
    return validated(schema, read_json(path, error=error, max_bytes=max_bytes), path, error=error, fix=fix)


def validated(
    schema: type[Schema], values: object, where: str | Path, *, error: type[D2SDError], fix: str | None = None
) -> Schema:
    """Fill `schema`. Raises `error`: the first fault with its key behind `where`, the others on a line each."""
    try:
        return schema.model_validate(values)
    except ValidationError as fault:
        # the inputs are not wanted as text: pydantic would print all of an alias bomb
        first, *others = fault.errors(include_url=False, include_context=False)
        key, what = _described(first)
        rest = [_described(one) for one in others[: _MOST - 1]]
        more = [f"\n  also: {': '.join(filter(None, one))}" for one in rest]
        if len(others) > len(rest):
            more.append(f"\n  also: {len(others) - len(rest)} more")
        found = None if first["type"] in ("missing", "value_error") else _quoted(first["input"])
        place = f"{where}: {key}" if key else where
        raise error(what + "".join(more), where=place, found=found, fix=fix) from None


def _described(error: ErrorDetails) -> tuple[str, str]:
    """Return (key, sentence)."""
    key = shortened(".".join(str(part) for part in error["loc"]))
    if error["type"] == "extra_forbidden":
        return key, "Unknown key."
    return key, shortened(error["msg"].removeprefix("Value error, "), 400) + "."


def _quoted(value: object) -> str:
    """Show a value as it would be written: text in quotes."""
    return repr(shortened(value, 160)) if isinstance(value, str) else shortened(value)
