"""The cells of a benchmark: methods x node budgets x prompt sets x temperatures x concurrencies, and their time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from d2sd.bench.metrics import ADAPTIVE, PLAIN
from d2sd.bench.result import Key
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import make_engine
from d2sd.errors import D2SDError
from d2sd.policies import FACTS, LOOKUP, parse_method
from d2sd.progress import bar
from d2sd.prompts import OWN_PROMPTS, read_prompts
from d2sd.recipe import Policy
from d2sd.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from d2sd.bundle.devices import BackendName
    from d2sd.bundle.load import Bundle
    from d2sd.recipe import Method

#: Methods whose tree grows with the node budget; the others have a fixed size.
GROWING = tuple(name for name, facts in FACTS.items() if facts.grows)


@dataclass(frozen=True, slots=True)
class Matrix:
    """The axes. Plain decoding is always included, as the baseline.

    A method written `name:rows` runs with this node budget only.
    """

    methods: Sequence[str]
    rows: Sequence[int]
    sets: Sequence[str]
    temperatures: Sequence[float]
    concurrencies: Sequence[int]
    block_size: int

    def keys(self) -> list[Key]:
        """Every cell once; plain decoding first in each set, the lowest concurrency first."""
        cells = (
            Key(method, rows, name, temperature, concurrency)
            for temperature in self.temperatures
            for concurrency in sorted(self.concurrencies)
            for name in self.sets
            for method, rows in (("off", 1), *self._trees())
        )
        return list(dict.fromkeys(cells))

    def plan(self, sets: Mapping[str, Sequence[object]], repeat: int) -> str:
        """The cells with the prompts of their sets, a line each, and how many answers they make."""
        keys = self.keys()
        lines = [f"{key}: {len(sets[key.set])} prompts" for key in keys]
        answers = sum(len(sets[key.set]) for key in keys) * repeat
        return "\n".join([*lines, f"{len(keys)} cells, {answers} answers"])

    def _trees(self) -> Iterator[tuple[str, int]]:
        for written in self.methods:
            method, _, pinned = written.partition(":")
            rows = (int(pinned),) if pinned else self.rows
            policy, _ = parse_method(method)
            if policy in GROWING:
                yield from ((method, budget) for budget in rows)
            elif policy == "auto":
                yield method, max(rows)
            elif policy != "off":
                yield method, min(self.block_size, max(rows))


def with_copies(policies: Sequence[Policy]) -> list[str]:
    """The policies, each that may copy earlier text also with copies; `auto` with them alone, as it is served."""
    methods: list[str] = []
    for name in policies:
        if name == "auto":
            methods.append(name + LOOKUP)
        else:
            methods += [name, name + LOOKUP] if FACTS[name].copies else [name]
    return methods


def read_sets(prompts: tuple[Path, ...], per_set: int) -> dict[str, list[tuple[str, str]]]:
    """(id, text) of the first `per_set` prompts of every set, by name: from JSONL files, folders of them, or our own.

    Raises D2SDError for two sets with the same name, an empty set, or two prompts with the same id.
    """
    files: list[Path] = []
    for path in prompts or (OWN_PROMPTS,):
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    sets = {path.stem: read_prompts(path)[:per_set] for path in files}
    if not sets or len(sets) < len(files) or not all(sets.values()):
        raise D2SDError(
            "Every prompt set needs a unique name and at least one prompt.",
            where=", ".join(map(str, prompts)),
            found=", ".join(f"{path.name}: {len(sets[path.stem])} prompts" for path in files) or "no *.jsonl",
        )
    for path in files:
        names = Counter(name for name, _ in sets[path.stem])
        if twice := [name for name, count in names.items() if count > 1]:
            raise D2SDError("Two prompts have the same id.", where=path, found=", ".join(sorted(twice)))
    return sets


#: Tokens of the answers that are timed, after as many of warm-up as are left out.
_TOKENS = 12
_WARM_UP = 2


def estimated_seconds(
    bundle: Bundle,
    matrix: Matrix,
    sets: Mapping[str, list[tuple[str, str]]],
    tokens: int,
    device: str,
    backend: BackendName,
) -> tuple[float, float]:
    """Return the least and the most seconds that answers of `tokens` tokens in every cell should take.

    The least: as many tokens a step as in the timed answer, and a batch costs as much as one request. The most: one
    token a step, and a batch of n costs n times as much. `auto` counts as plain decoding, which it is not slower than;
    its measurement of step costs is left out.
    """
    keys = matrix.keys()
    shapes = sorted({_shape(key.method, key.rows) for key in keys})
    times: dict[tuple[str, int], tuple[float, float]] = {}
    text = next(iter(sets.values()))[0][1]
    with bar("timing one answer of each method", len(shapes)) as advance:
        for method, rows in shapes:
            times[method, rows] = _timed(bundle, method, rows, text, device, backend)
            advance(1)
    least = most = 0.0
    for key in keys:
        answers = len(sets[key.set]) * tokens
        step, tau = times[_shape(key.method, key.rows)]
        least += answers * step / tau / key.concurrency
        most += answers * step
    return least, most


def duration(seconds: float) -> str:
    """Return seconds below two minutes, minutes below two hours, or hours, rounded up."""
    for unit, size in (("s", 1), ("min", 60)):
        if seconds < 120 * size:
            return f"{-(-seconds // size):.0f} {unit}"
    return f"{-(-seconds // 3600):.0f} h"


def _shape(method: str, rows: int) -> tuple[str, int]:
    return (PLAIN, 1) if parse_method(method)[0] == ADAPTIVE else (method, rows)


def _timed(bundle: Bundle, method: str, rows: int, text: str, device: str, backend: BackendName) -> tuple[float, float]:
    """Seconds of a step, and tokens a step."""
    engine = make_engine(
        bundle,
        policy=cast("Method", method),
        lookup=False,
        row_budget=rows if rows > 1 else None,
        device=device,
        backend=backend,
        max_batch=1,
    )
    request = chat_request(bundle, text, SamplingParams(), _WARM_UP)
    engine.generate([request])
    engine.clock.clear()
    (answer,) = engine.generate([chat_request(bundle, text, SamplingParams(), _TOKENS)])
    return engine.clock.step_seconds, answer.stats.tau
