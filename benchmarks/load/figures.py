"""The figures of a measured load: TTFT and ITL as in `d2sd.bench.latency`; E2E: to the response's end."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from benchmarks.load.client import Reply
from d2sd.bench.latency import Slo, Spread, token_latencies


class Sample(BaseModel):
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
        return slo.met(self.ttft, self.itl)


class Figures(BaseModel):
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
