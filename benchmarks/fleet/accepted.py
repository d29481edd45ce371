"""Accepted lengths as distributions: tokens that a request gains in one step, bonus token included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

#: Resolution of a draw: lengths of probability below 1 / DRAWS may never be drawn.
DRAWS = 4096


def capped_geometric(mean: float, longest: int) -> list[float]:
    """Probabilities of 1 .. `longest` tokens if each further draft is accepted with the same probability a.

    Then the mean is (1 - a^n) / (1 - a) for n = `longest` (Leviathan et al., arXiv 2211.17192), which is solved for a.
    """
    assert 1 <= mean <= longest, f"{mean} tokens a step of at most {longest}"
    low, high = 0.0, 1.0
    for _ in range(60):
        a = (low + high) / 2
        low, high = (a, high) if sum(a**k for k in range(longest)) < mean else (low, a)
    return [high ** (k - 1) * (1 - high if k < longest else 1.0) for k in range(1, longest + 1)]


def shares(lengths: Iterable[int], longest: int) -> list[float]:
    """Observed shares of 1 .. `longest` tokens over the steps of one response."""
    counted = Counter(lengths)
    return [counted[k] / counted.total() for k in range(1, longest + 1)]


def mean_length(distribution: Sequence[float]) -> float:
    """Tokens a step."""
    return sum(k * share for k, share in enumerate(distribution, 1)) / sum(distribution)


def lengths_by_draw(distribution: Sequence[float]) -> list[int]:
    """The accepted length of every draw 0 .. DRAWS - 1: the inverse of the cumulative distribution."""
    cumulative: npt.NDArray[np.float64] = np.cumsum(distribution)
    places = (np.arange(DRAWS) + 0.5) / DRAWS * cumulative[-1]
    return [int(k) + 1 for k in np.searchsorted(cumulative, places)]
