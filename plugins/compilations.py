"""Says which kernels Triton compiles, by its own hook: in service, each is a second or more for which requests wait."""

# Triton has no types, and may be missing where a user's type checker follows these sources.
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


def watch_compilations(report: Callable[[str], None]) -> None:
    """Call `report` with the name of each kernel that is compiled from now on, or loaded from Triton's cache on disk.

    In place of the function given before, in all threads of this process.
    """
    if find_spec("triton") is None:
        return
    from triton import knobs

    def compiled(*, fn: Any, **_: object) -> None:
        report(fn.name)

    knobs.runtime.jit_post_compile_hook = compiled
