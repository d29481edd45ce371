"""Percentile bootstrap over prompts: how far a figure would move with other prompts of the same kind.

Steps of one response depend on each other and prompts do not, so whole prompts are resampled. An interval says
nothing about other machines or other drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from d2sd.bench.metrics import response_tau
from d2sd.bench.result import Cell

RESAMPLES = 2000
LEVEL = 0.95
_SEED = 0  # the same result gives the same intervals, whatever was computed before


class Interval(NamedTuple):
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        return not self.low <= value <= self.high


class Ratio(NamedTuple):
    """`interval` is None below two prompts."""

    value: float
    interval: Interval | None
    prompts: int


def tau_interval(cells: Sequence[Cell]) -> Interval | None:
    """Percentile bootstrap of τ, or of its mean over sets: 2,000 resamples of the prompts, set by set. None where a
    set has fewer than two prompts, for one does not say how much prompts differ.
    """
    rng = np.random.default_rng(_SEED)
    if any(len(cell.requests) < 2 for cell in cells):
        return None
    means = [_resampled(rng, np.array([response_tau(r) for r in cell.requests]))[:, 0] for cell in cells]
    return _percentiles(np.mean(means, axis=0))


def tau_ratio(old: Cell, new: Cell) -> Ratio | None:
    """τ of `new` over τ of `old` on the prompts both have, resampled together; None where they share none.

    Two results of one cell, or two methods on one set: prompts that are easy for both cancel out.
    """
    before = {r.id: response_tau(r) for r in old.requests}
    after = {r.id: response_tau(r) for r in new.requests}
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
