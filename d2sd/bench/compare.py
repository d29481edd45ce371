"""Compare two results: the effect of a change of code, drafters or machine on their common cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from d2sd.bench import metrics, views
from d2sd.bench.bootstrap import Interval, tau_ratio
from d2sd.bench.markdown import NONE, number, table
from d2sd.bench.result import Cell, Key, Result, ResultError
from d2sd.viz.plot_style import Line

NOTES = """\
A ratio is B / A. τ of A, τ of B and their ratio use the prompts that both have; if they share none, all prompts,
without an interval. The interval is a 95 % percentile bootstrap in which a prompt's two responses are resampled
together; ▲ and ▼ mark intervals that exclude 1. The geometric mean excludes plain decoding, whose τ is 1; its
tokens/s ratio shows whether the two machines were equally fast."""


def compare(a: Result, b: Result) -> str:
    """Markdown: B / A of every common cell, and the cells that only one has. Raises `ResultError` if none is common."""
    old, new = ({cell.key: cell for cell in result.cells} for result in (a, b))
    common = sorted(old.keys() & new.keys(), key=_order)
    if not common:
        raise ResultError(
            "The two results have no cell in common.",
            found=f"A has {_summary(old)}; B has {_summary(new)}",
            expected="equal method, rows, set, temperature and concurrency in at least one cell",
        )
    pairs = [_pair(old[key], new[key]) for key in common]
    parts = ["## B against A", _unequal(a, b), _table(pairs)]
    parts += [_overall([pair for pair in pairs if pair.key.method != views.PLAIN])]
    parts += [_only("A", [k for k in old if k not in new]), _only("B", [k for k in new if k not in old]), NOTES]
    return "\n\n".join(filter(None, parts))


class _Pair(NamedTuple):
    """One cell in A and B; both τ are of the shared prompts if there are any."""

    key: Key
    before: float
    after: float
    interval: Interval | None
    shared: int
    prompts: int
    speed: float | None  # ratio of tokens per second

    @property
    def ratio(self) -> float:
        return self.after / self.before


def _pair(a: Cell, b: Cell) -> _Pair:
    ids = {r.id for r in a.requests} & {r.id for r in b.requests}
    x, y = (c.model_copy(update={"requests": [r for r in c.requests if r.id in ids or not ids]}) for c in (a, b))
    paired, unit = tau_ratio(a, b), metrics.tokens_per_second(a)
    return _Pair(
        key=a.key,
        before=x.tau,
        after=y.tau,
        interval=paired.interval if paired else None,
        shared=len(ids),
        prompts=len(a.requests),
        speed=metrics.tokens_per_second(b) / unit if unit else None,
    )


def _table(pairs: Sequence[_Pair]) -> str:
    return table(
        [
            ("method", [pair.key.method for pair in pairs]),
            ("row budget", [str(pair.key.rows) for pair in pairs]),
            ("set", [pair.key.set for pair in pairs]),
            ("T", [f"{pair.key.temperature:g}" for pair in pairs]),
            ("in flight", [str(pair.key.concurrency) for pair in pairs]),
            ("prompts", [f"{pair.shared} of {pair.prompts}" for pair in pairs]),
            ("τ A", [number(pair.before) for pair in pairs]),
            ("τ B", [number(pair.after) for pair in pairs]),
            ("τ ratio", [number(pair.ratio, 3) for pair in pairs]),
            ("95 % interval", [_marked(pair.interval) for pair in pairs]),
            ("tokens/s ratio", [number(pair.speed) for pair in pairs]),
        ]
    )


def _marked(interval: Interval | None) -> str:
    if interval is None:
        return NONE
    mark = "" if not interval.excludes(1) else " ▲" if interval.low > 1 else " ▼"
    return f"{interval.low:.3f} – {interval.high:.3f}{mark}"


def _overall(pairs: Sequence[_Pair]) -> str:
    if not pairs:
        return ""
    speeds = [pair.speed for pair in pairs if pair.speed]
    speed = f", tokens/s {_geometric(speeds):.3f}" if speeds else ""
    return f"**Geometric mean over {len(pairs)} cells: τ {_geometric([p.ratio for p in pairs]):.3f}{speed}**"


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _unequal(a: Result, b: Result) -> str:
    """The settings that differ, since they confound a ratio."""
    x, y = map(_circumstances, (a, b))
    differing = [f"{key} ({x.get(key, NONE)} | {y.get(key, NONE)})" for key in {**x, **y} if x.get(key) != y.get(key)]
    return f"Differs between A | B: {', '.join(differing)}." if differing else ""


def _circumstances(result: Result) -> dict[str, str | int]:
    of = result.provenance
    circumstances: dict[str, str | int] = {**result.settings.model_dump(), "device": of.device}
    circumstances |= {f"machine {key}": value for key, value in of.machine.items()}
    return circumstances | {f"bundle {key}": value for key, value in of.bundle.items()}


def _only(name: str, keys: Sequence[Key]) -> str:
    return "\n".join([f"Only in {name}:", "", *(f"- {key}" for key in sorted(keys, key=_order))]) if keys else ""


def _order(key: Key) -> tuple[float, int, tuple[int, str, int], str]:
    return key.temperature, key.concurrency, views.place(Line(key.method, key.rows)), key.set


def _summary(cells: dict[Key, Cell]) -> str:
    first = min(cells, key=_order)
    return f"{first}" + (f" and {len(cells) - 1} more" if len(cells) > 1 else "")
