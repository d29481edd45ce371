"""Types of what a Python caller passes: strict as pydantic's, with numpy's and torch's numbers as Python's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from d2sd.errors import D2SDError, RequestError, shortened

WRONG_TYPE = "This has the wrong type or value."


def plain(value: Any, depth: int = 1) -> Any:
    """Turn arrays, tensors and their numbers into Python's, also inside sequences and mappings `depth` deep."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if depth > 0 and isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return tuple(plain(entry, depth - 1) for entry in value)
    if depth > 0 and isinstance(value, Mapping):
        return {plain(key, 0): plain(entry, depth - 1) for key, entry in value.items()}
    return value


def typed(value: Any, kind: Any, where: str, error: type[D2SDError] = RequestError) -> Any:
    """Return `value`, made `plain`, if it has the annotated type `kind`; a number may be an integer. Raises `error`.

    Nothing is converted: neither text to numbers nor bools to integers.
    """
    try:
        return _adapter(kind).validate_python(plain(value))
    except ValidationError as problem:
        expected = "; ".join(
            dict.fromkeys(fault["msg"] for fault in problem.errors(include_url=False, include_input=False))
        )
        raise error(WRONG_TYPE, where=where, found=named(value), expected=expected) from None


def named(value: object) -> str:
    """Show a value with its type, for the `found` of an error."""
    return "None" if value is None else f"{type(value).__name__}: {shortened(value)}"


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True))
