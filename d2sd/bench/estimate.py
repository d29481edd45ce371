"""How long a benchmark takes on this machine: from one short answer of every method."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from d2sd.bench.views import ADAPTIVE, PLAIN
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import make_engine
from d2sd.policies import parse_method
from d2sd.progress import bar
from d2sd.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from d2sd.bench.matrix import Matrix
    from d2sd.bundle.devices import BackendName
    from d2sd.bundle.load import Bundle
    from d2sd.recipe import Method

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
