"""Latencies of served requests, measured or simulated: definitions and percentiles.

TTFT: from sending a request to the arrival of its first tokens. ITL, inter-token latency, is of tokens and not of
chunks: k tokens that arrive t after the chunk before them are k latencies of t / k. The tokens of the first chunk have
none. A request meets the SLO if its TTFT and its mean ITL do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel


class Slo(BaseModel):
    """Bounds in seconds of a request that counts for goodput."""

    ttft: float
    itl: float

    def met(self, ttft: float, itl: Sequence[float]) -> bool:
        """Whether a request with this TTFT and these latencies of tokens counts."""
        mean = sum(itl) / len(itl) if len(itl) else 0.0
        return ttft <= self.ttft and mean <= self.itl


class Spread(BaseModel):
    """Percentiles of a latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float] | npt.NDArray[np.float64]) -> Spread:
        """All zero if there is no value."""
        values = 1e3 * np.asarray(seconds if len(seconds) else [0.0])
        p50, p90, p99 = np.percentile(values, [50, 90, 99])
        return cls(mean=float(values.mean()), p50=float(p50), p90=float(p90), p99=float(p99))


def token_latencies(arrivals: Sequence[tuple[float, int]]) -> list[float]:
    """ITL in seconds of every token after the first chunk; `arrivals` are (seconds, tokens) of the chunks."""
    found: list[float] = []
    for (before, _), (now, count) in pairwise(arrivals):
        found += [(now - before) / count] * count
    return found
