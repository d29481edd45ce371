"""Builds, what their bundles write, and builds that end in the middle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from d2sd.build.pipeline import build
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.bundle.serving import make_engine
from d2sd.recipe import Policy, load_recipe
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from tests.convert.helpers import tree_bytes

#: A greedy one and a sampled one.
REQUESTS = [Request((5, 9, 1, 33), 12, SamplingParams(seed=1)), Request((60, 3), 16, SamplingParams(1.0, seed=2))]


def run(recipe: Path, output: Path, **options: Any) -> dict[str, bytes]:
    build(load_recipe(recipe), output, validate=False, **options)
    return tree_bytes(output)


def made(recipe: Path, *, validate: bool = False) -> Bundle:
    """The bundle of a recipe, beside its project."""
    output = recipe.parent.parent / "bundle"
    build(load_recipe(recipe), output, validate=validate)
    return load_bundle(output)


def answers(bundle: Bundle, policy: Policy) -> list[list[int]]:
    """Answers to `REQUESTS`."""
    return [sequence.answer for sequence in make_engine(bundle, policy=policy).generate(REQUESTS)]


class Killed(BaseException):
    """Not an Exception, as a signal is none."""


def killed_after(last: str) -> Callable[[str], None]:
    """A build's `finished` that ends it behind this stage."""

    def finished(stage: str) -> None:
        if stage == last:
            raise Killed

    return finished
