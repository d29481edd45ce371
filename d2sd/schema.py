"""Pydantic models read from files; every mismatch is a `D2SDError` that names file and key."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from d2sd.errors import D2SDError, shortened
from d2sd.io import read_json

Schema = TypeVar("Schema", bound=BaseModel)
#: Most faults of one file that are listed; the others are counted.
_MOST = 10


class Closed(BaseModel):
    """Values that do not change: no other keys, and numbers that are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def read_model(
    schema: type[Schema],
    path: Path,
    *,
    error: type[D2SDError],
    what: str,
    version: tuple[str, int] | None = None,
    fix: str | None = None,
) -> Schema:
    """Read a JSON file into `schema`; messages call the file `what`.

    `version` is the key of the file's schema version and the supported version. Raises `error` naming file and key.
    """
    # NaN is refused by the schema, which names its key
    values = read_json(path, error=error, what=what, finite=False)
    if version is not None:
        key, expected = version
        if not isinstance(values, dict) or key not in values:
            raise error(f"The {what} is damaged.", where=path, found=f"no key {key}", fix=fix)
        if type(values[key]) is not int or values[key] != expected:  # exact: a bool is not accepted
            raise error(
                f"The {what} has another schema version.",
                where=f"{path}: {key}",
                found=values[key],
                expected=expected,
                fix=fix,
            )
    return validated(schema, values, path, error=error, what=f"The {what} is damaged.", fix=fix)


def validated(
    schema: type[Schema],
    values: object,
    where: str | Path,
    *,
    error: type[D2SDError],
    what: str | None = None,
    fix: str | None = None,
) -> Schema:
    """Validate `values`. Raises `error` with the key of the first fault after `where`, and a line per further fault.

    The first fault is the message's first sentence, or its `found` if `what` is given.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as fault:
        # str(fault) would print the whole input
        first, *others = fault.errors(include_url=False, include_context=False)
        key, sentence = _described(first)
        more = [": ".join(filter(None, _described(other))) for other in others[: _MOST - 1]]
        if len(others) > len(more):
            more.append(f"{len(others) - len(more)} more")
        found = None if first["type"] in ("missing", "value_error") else _quoted(first["input"])
        if first["type"] == "extra_forbidden" and fix is None:
            fix = _nearest(schema, str(first["loc"][-1]))
        elif fix is None and "; fix: " in sentence:
            sentence, _, fix = sentence.removesuffix(".").partition("; fix: ")
        if what is not None:
            found = sentence if found is None else f"{found}: {sentence}"
        lines = [what or sentence, *(f"  also: {line}" for line in more)]
        raise error("\n".join(lines), where=f"{where}: {key}" if key else where, found=found, fix=fix) from None


def _described(error: ErrorDetails) -> tuple[str, str]:
    """Return (key, sentence)."""
    key = shortened(".".join(str(part) for part in error["loc"]))
    if error["type"] == "extra_forbidden":
        return key, "Unknown key."
    return key, shortened(error["msg"].removeprefix("Value error, "), 400) + "."


def _nearest(schema: type[BaseModel], key: str) -> str | None:
    """Name the keys of a schema and its parts that are spelled most like `key`."""
    described = schema.model_json_schema()
    known = {name for part in (described, *described.get("$defs", {}).values()) for name in part.get("properties", ())}
    nearest = get_close_matches(key, known, cutoff=0.7)
    return f"the nearest keys are {', '.join(nearest)}" if nearest else None


def _quoted(value: object) -> str:
    """Show a value as in a recipe, with text in quotes."""
    return repr(shortened(value, 80)) if isinstance(value, str) else shortened(value, 80)
