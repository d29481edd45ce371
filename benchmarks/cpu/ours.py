"""d2sd's engine as a contestant."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from benchmarks.cpu.contestant import Key, Limits, Passed, Tokens
from d2sd.bundle.load import Bundle, assemble, load_bundle
from d2sd.bundle.serving import make_engine
from d2sd.errors import D2SDError
from d2sd.manifest import Manifest
from d2sd.progress import bar
from d2sd.recipe import Policy
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams

Precision = Literal["fp32", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
POLICIES: tuple[Policy, ...] = ("off", "auto")


class Ours:
    """An engine. Its prefix cache is off: repetitions ask the same prompts."""

    def __init__(self, bundle: Bundle, policy: Policy, precision: Precision, limits: Limits) -> None:
        self.key = Key("d2sd", policy, precision, policy == "off")
        self._limits = limits
        self._engine = make_engine(bundle, policy=policy, max_batch=limits.in_flight, prefix_cache=False)

    def answer(self, prompts: Sequence[Tokens]) -> Passed:
        limits, clock = self._limits, self._engine.clock
        requests = [Request(tuple(one), limits.max_new_tokens, SamplingParams(), limits.stop_tokens) for one in prompts]
        clock.clear()
        start = time.perf_counter()
        sequences = self._engine.generate(requests)
        seconds = time.perf_counter() - start
        return Passed(seconds, clock.seconds["prefill"], clock.steps, [one.answer for one in sequences])


def engines(folder: Path, limits: Limits) -> Iterator[Ours]:
    """Every policy in every precision; both policies share the packed target."""
    manifest = load_bundle(folder, progress=bar).manifest
    if manifest.recipe.precision != "fp32":
        raise D2SDError(
            "The bundle's weights are rounded: llama.cpp and transformers would have others.",
            where=f"{folder}: precision",
            found=manifest.recipe.precision,
            expected="fp32",
            fix="build the bundle with --set precision=fp32",
        )
    for precision in PRECISIONS:
        bundle = assemble(folder, in_precision(manifest, precision))
        for policy in POLICIES:
            yield Ours(bundle, policy, precision, limits)


def in_precision(manifest: Manifest, precision: Precision) -> Manifest:
    """The manifest of the same bundle, loaded in another precision."""
    recipe = manifest.recipe.model_copy(update={"precision": precision})
    return manifest.model_copy(update={"recipe": recipe})
