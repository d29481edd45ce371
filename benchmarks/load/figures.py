"""The figures of a measured load: TTFT, ITL and E2E, which is to the response's end.

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

from benchmarks.load.client import Reply
from d2sd.bench.result import Part


class Slo(BaseModel):
    """Bounds in seconds of a request that counts for goodput: of its TTFT, and of its mean inter-token latency."""

    ttft: float
    itl: float


class Sample(Part):
    """One request, as measured; times are in seconds."""

    ttft: float
    itl: list[float]
    e2e: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    accepted: int  # drafted tokens in the answer

    @classmethod
    def of(cls, reply: Reply) -> Sample:
        """The sample of a complete reply; raises ValueError for one that is not."""
        if not reply.complete or not reply.arrivals:
            raise ValueError(f"a request failed: status {reply.status}, {reply.error}")
        latencies = [round(one, 6) for one in token_latencies(reply.arrivals)]
        details = reply.usage.get("completion_tokens_details") or {}
        prompt = reply.usage.get("prompt_tokens_details") or {}
        return cls(
            ttft=round(reply.arrivals[0][0], 6),
            itl=latencies,
            e2e=round(reply.end, 6),
            prompt_tokens=reply.usage["prompt_tokens"],
            cached_tokens=prompt.get("cached_tokens") or 0,
            tokens=reply.tokens,
            accepted=details.get("accepted_prediction_tokens") or 0,
        )

    def meets(self, slo: Slo) -> bool:
        mean = sum(self.itl) / len(self.itl) if self.itl else 0.0
        return self.ttft <= slo.ttft and mean <= slo.itl


class Spread(Part):
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


class Figures(Part):
    """One load on one server."""

    requests: int
    seconds: float
    ttft: Spread
    itl: Spread
    e2e: Spread
    tokens_per_second: float  # generated
    requests_per_second: float
    goodput: float  # requests a second that met the SLO
    accepted_length: float  # tokens a step, bonus token included
    prompt_tokens: int
    computed_prompt_tokens: int  # not found in the prefix cache
    cpu_per_token: float | None  # milliseconds of the server's processor time a generated token

    @classmethod
    def of(cls, samples: Sequence[Sample], seconds: float, cpu_seconds: float | None, slo: Slo) -> Figures:
        """Figures of the samples of one load that took `seconds`."""
        tokens = sum(sample.tokens for sample in samples)
        prompt = sum(sample.prompt_tokens for sample in samples)
        return cls(
            requests=len(samples),
            seconds=seconds,
            ttft=Spread.of([sample.ttft for sample in samples]),
            itl=Spread.of([one for sample in samples for one in sample.itl]),
            e2e=Spread.of([sample.e2e for sample in samples]),
            tokens_per_second=tokens / seconds,
            requests_per_second=len(samples) / seconds,
            goodput=sum(sample.meets(slo) for sample in samples) / seconds,
            accepted_length=tokens / max(1, tokens - sum(sample.accepted for sample in samples)),
            prompt_tokens=prompt,
            computed_prompt_tokens=prompt - sum(sample.cached_tokens for sample in samples),
            cpu_per_token=None if cpu_seconds is None else 1e3 * cpu_seconds / max(1, tokens),
        )
