"""Panics of libraries in Rust: they arrive as a BaseException of pyo3, which handlers of errors let pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from d2sd.errors import D2SDError


def is_panic(error: BaseException) -> bool:
    """Whether the error is a panic."""
    return type(error).__module__ == "pyo3_runtime"


@contextmanager
def panics_as(kind: type[D2SDError], what: str, **labels: Any) -> Iterator[None]:
    """Raise an error of this kind, with these labels, in place of a panic in the block."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise kind(what, found=f"a panic of a library: {error}", **labels) from None
