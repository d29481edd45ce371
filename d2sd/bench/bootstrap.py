"""Percentile bootstrap over prompts: how much a metric would vary with other prompts of the same kind.

Steps of one response are correlated and prompts are not, so whole prompts are resampled. An interval does not cover
other machines or other drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from d2sd.bench.result import Cell
from d2sd.runtime.evaluation import Evaluation

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
