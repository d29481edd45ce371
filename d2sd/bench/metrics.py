"""Selection, order and pooling of cells, and every metric of the report as a pure function of them.

The docstrings of metrics are printed under the tables.

Intervals are percentile bootstraps: how much a metric would vary with other prompts of the same kind. Steps of one
response are correlated and prompts are not, so whole prompts are resampled. An interval does not cover other machines
or other drafters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from d2sd.bench.result import Cell, Difference, Response, Result
from d2sd.policies import DrafterName, parse_method
from d2sd.runtime.evaluation import Evaluation
from d2sd.runtime.stats import Bin
from d2sd.viz import plot_style as style
from d2sd.viz.plot_style import Line

#: The order of lines. A method that is not listed comes last.
METHODS = tuple(style.METHODS)
PLAIN = "off"
ADAPTIVE = "auto"
#: Figures of a cell that add up over sets.
SUMMED = ("verified_rows", "traced_steps", "nodes", "merged", "rescued", "steps", "wall_seconds")


class View(NamedTuple):
    """A result at one temperature and concurrency."""

    result: Result
    temperature: float
    concurrency: int

    def __str__(self) -> str:
        return f"T = {self.temperature:g}, {self.concurrency} in flight"

    @property
    def lines(self) -> list[Line]:
        """The measured lines, in the order of `place`."""
        at = (self.temperature, self.concurrency)
        measured = {Line(c.method, c.rows) for c in self.result.cells if (c.temperature, c.concurrency) == at}
        return sorted(measured, key=place)

    @property
    def widest(self) -> list[Line]:
        """Every method once, at its largest row budget."""
        return list({line.method: line for line in self.lines}.values())

    def cells(self, line: Line) -> dict[str, Cell]:
        """The cells of a line by set, in the order of `sets`."""
        by_key = {cell.key: cell for cell in self.result.cells}
        keys = {name: (*line, name, self.temperature, self.concurrency) for name in sets(self.result)}
        return {name: by_key[key] for name, key in keys.items() if key in by_key}

    def pooled(self, line: Line) -> tuple[Cell, Cell | None]:
        """All sets of a line as one cell, and plain decoding on the same sets, None if it was not measured."""
        ours, plain = self.cells(line), self.cells(Line(PLAIN, 1))
        both = ours.keys() <= plain.keys()
        return pool(list(ours.values())), pool([plain[name] for name in ours]) if both else None


def temperatures(result: Result) -> list[float]:
    return sorted({cell.temperature for cell in result.cells})


def views(result: Result, temperature: float) -> list[View]:
    """The result at each concurrency of a temperature, the lowest first."""
    measured = {cell.concurrency for cell in result.cells if cell.temperature == temperature}
    return [View(result, temperature, concurrency) for concurrency in sorted(measured)]


def sets(result: Result) -> list[str]:
    """Names of the prompt sets, in the order measured."""
    return list(dict.fromkeys(cell.set for cell in result.cells))


def place(line: Line) -> tuple[int, str, int]:
    """Sort key of lines."""
    policy, _ = parse_method(line.method)
    return (METHODS.index(policy) if policy in METHODS else len(METHODS), *line)


def compared(result: Result) -> list[Cell]:
    """The cells whose responses were compared with plain decoding: all but that itself at the lowest concurrency."""
    lowest = {temperature: views(result, temperature)[0].concurrency for temperature in temperatures(result)}
    return [c for c in result.cells if (c.method, c.concurrency) != (PLAIN, lowest[c.temperature])]


def runs(cells: Sequence[Cell]) -> str:
    """Say in words which figures are of which run."""
    if any(cell.traced_steps for cell in cells):
        return (
            "all figures are of engines as served, whose steps run ahead, but nodes, merged, rescued, ECE and boundary "
            "ranks: these are of a second, traced run of the same requests, whose answers were compared"
        )
    return "times and counts are of one run: steps that do not run ahead are served alike with a trace and without"


def pool(cells: Sequence[Cell]) -> Cell:
    """Merge cells that differ only in their sets: all requests, and sums of all counts."""
    head, requests, differences = cells[0], list[Response](), list[Difference]()
    counts = {name: Counter[str]() for name in ("policies", "boundary_rank", "stage_seconds")}
    bins: dict[DrafterName, list[Bin]] = {}
    for cell in cells:
        assert cell.key._replace(set=head.set) == head.key
        differences += [d.model_copy(update={"request": d.request + len(requests)}) for d in cell.differences]
        requests += [r.model_copy(update={"id": f"{cell.set}/{r.id}"}) for r in cell.requests]
        for name, summed in counts.items():
            summed.update(getattr(cell, name))
        for drafter, new in cell.calibration.items():
            old = bins.get(drafter, [(0, 0.0, 0)] * len(new))
            bins[drafter] = [(a + x, b + y, c + z) for (a, b, c), (x, y, z) in zip(old, new, strict=True)]
    sums = {name: sum(getattr(cell, name) for cell in cells) for name in SUMMED}
    merged = {"set": "all", "requests": requests, "differences": differences, "calibration": bins, **sums}
    return head.model_copy(update=merged | {name: dict(summed) for name, summed in counts.items()})


def mean_tau(cells: Sequence[Cell]) -> float:
    """Mean over sets of each set's τ: every set has equal weight."""
    return sum(cell.tau for cell in cells) / len(cells)


def tau_by_token(cell: Cell) -> float:
    """All committed tokens over all request-steps: long responses have more weight than in τ."""
    return cell.total.tau


def request_steps(cell: Cell) -> int:
    """Decode steps summed over requests: a step that serves three requests counts three times."""
    return cell.total.steps


def traced_steps(cell: Cell) -> int:
    """Request-steps of the run that was traced: the timed one, where that does not change what is served."""
    return cell.traced_steps or request_steps(cell)


def committed(cell: Cell) -> int:
    """Tokens committed by all steps, including those past a stop token or the length limit."""
    return cell.total.tokens


def rows_per_step(cell: Cell) -> float:
    """Rows verified by the target per request-step, padding included."""
    return cell.verified_rows / request_steps(cell)


def rows_per_token(cell: Cell) -> float:
    """Rows verified by the target per committed token: the work for a token."""
    return cell.verified_rows / committed(cell)


def mean_nodes(cell: Cell) -> float:
    """Valid tree nodes per request-step, the anchor included."""
    return cell.nodes / traced_steps(cell)


def merged_per_step(cell: Cell) -> float:
    """Drafted tokens per request-step merged into an existing node, which cost no row of their own."""
    return cell.merged / traced_steps(cell)


def rescued_share(cell: Cell) -> float:
    """Share of request-steps in which nodes of the second pass extended acceptance beyond the first draft's chain."""
    return cell.rescued / traced_steps(cell)


def served(cell: Cell) -> dict[str, float]:
    """Share of request-steps by the policy that `auto` selected."""
    counted = sum(cell.policies.values())
    return {policy: count / counted for policy, count in sorted(cell.policies.items()) if counted}


def boundary_ranks(cell: Cell) -> dict[str, float]:
    """Share of request-steps by the rank, among the K branches, of the position where the target rejected the first
    draft; "none" if no branch restarts there. Rank 0 has the highest predicted probability.
    """
    counted = sum(cell.boundary_rank.values())
    ranks = sorted(cell.boundary_rank, key=lambda rank: (rank == "none", len(rank), rank))
    return {rank: cell.boundary_rank[rank] / counted for rank in ranks if counted}


def step_seconds(cell: Cell) -> float:
    """Mean time of an engine step in seconds, without prefill."""
    return sum(spent for stage, spent in cell.stage_seconds.items() if stage != "prefill") / cell.steps


def cycle_cost(cell: Cell, plain: Cell | None) -> float | None:
    """Mean time of an engine step, without prefill, over that of plain decoding on the same sets, at the same
    temperature and concurrency.
    """
    return _over_plain(step_seconds, cell, plain)


def tokens_per_second(cell: Cell) -> float:
    """Response tokens of all requests over the wall time of the whole cell, prefill included."""
    return sum(response.tokens for response in cell.requests) / cell.wall_seconds


def speedup(cell: Cell, plain: Cell | None) -> float | None:
    """Tokens per second over those of plain decoding on the same sets, at the same temperature and concurrency."""
    return _over_plain(tokens_per_second, cell, plain)


def _over_plain(metric: Callable[[Cell], float], cell: Cell, plain: Cell | None) -> float | None:
    """The figure over that of plain decoding; None if that was not measured, or is 0."""
    if plain is None:
        return None
    assert (cell.set, cell.temperature, cell.concurrency) == (plain.set, plain.temperature, plain.concurrency)
    unit = metric(plain)
    return metric(cell) / unit if unit else None


RESAMPLES = 2000
LEVEL = 0.95
_SEED = 0  # fixed, so the same result always gives the same intervals


class Interval(NamedTuple):
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        return not self.low <= value <= self.high


class Ratio(NamedTuple):
    """Ratio of means over `prompts` prompts; `interval` is None for fewer than two."""

    value: float
    interval: Interval | None
    prompts: int


def tau_interval(cells: Sequence[Cell]) -> Interval | None:
    """Percentile bootstrap of τ, or of its mean over sets: 2,000 resamples of the prompts, set by set. None if a
    set has fewer than two prompts, since one prompt has no variance.
    """
    rng = np.random.default_rng(_SEED)
    if any(len(cell.requests) < 2 for cell in cells):
        return None
    means = [_resampled(rng, np.array([r.stats.tau for r in cell.requests]))[:, 0] for cell in cells]
    return _percentiles(np.mean(means, axis=0))


def tau_ratio(old: Evaluation, new: Evaluation) -> Ratio | None:
    """τ of `new` over τ of `old` on the prompts both have, resampled in pairs; None if they share none.

    For two results of one cell, or two methods on one set: the difficulty of a prompt cancels out.
    """
    before = {r.id: r.stats.tau for r in old.requests}
    after = {r.id: r.stats.tau for r in new.requests}
    pairs = np.array([(before[name], after[name]) for name in before if name in after])
    if not len(pairs):
        return None
    a, b = pairs.mean(axis=0)
    if len(pairs) < 2:
        return Ratio(float(b / a), None, len(pairs))
    means = _resampled(np.random.default_rng(_SEED), pairs)
    return Ratio(float(b / a), _percentiles(means[:, 1] / means[:, 0]), len(pairs))


def _resampled(rng: np.random.Generator, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Means over resampled prompts: [n] or [n, columns] -> [RESAMPLES, columns]."""
    columns = values.reshape(len(values), -1)
    drawn = columns[rng.integers(len(columns), size=(RESAMPLES, len(columns)))]
    return np.asarray(drawn.mean(axis=1), dtype=np.float64)


def _percentiles(values: npt.NDArray[np.float64]) -> Interval:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))
