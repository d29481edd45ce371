"""Builds that are not validated, and builds that end in the middle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from d2sd.build.pipeline import build
from d2sd.recipe import load_recipe
from tests.convert.helpers import tree_bytes


def run(recipe: Path, output: Path, **options: Any) -> dict[str, bytes]:
    build(load_recipe(recipe), output, validate=False, **options)
    return tree_bytes(output)


class Killed(BaseException):
    """Not an Exception, as a signal is none."""


def killed_after(last: str) -> Callable[[str], None]:
    """A build's `finished` that ends it behind this stage."""

    def finished(stage: str) -> None:
        if stage == last:
            raise Killed

    return finished
