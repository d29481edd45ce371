"""The figures of a simulated run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel

from benchmarks.fleet.simulate import Simulation
from benchmarks.fleet.worker import Stream
from d2sd.bench.latency import Slo, Spread, token_latencies


class FleetFigures(BaseModel):
    """Requests that arrived in a window of time; rates are of what was delivered in it."""

    requests: int
    finished: int
    refused: int
    failed: int
    moved: int  # requests that lost a worker
    tokens_per_second: float
    requests_per_second: float  # finished ones that arrived in the window
    goodput: float  # of these, the ones that met the SLO
    attainment: float  # share of the requests that finished and met the SLO
    ttft: Spread
    itl: Spread
    in_flight: float  # mean number of requests in a decode step
    pages: float  # K/V pages in use at a worker, p99 over steps
    prefill_tokens: int  # computed in the whole run
    preemptions: int
    hit_rate: float  # share of the prompt tokens found in the prefix cache, over the whole run
    utilization: float  # share of the workers' time in steps, over the whole run


def figures(run: Simulation, streams: Sequence[Stream], slo: Slo, window: tuple[float, float]) -> FleetFigures:
    """Figures of the requests that arrived from `window[0]` to `window[1]`, in seconds."""
    begin, end = window
    seconds = end - begin
    asked = [one for one in streams if begin <= one.arrival < end]
    done = [one for one in asked if one.outcome == "finished"]
    ttft = [one.chunks[0][0] - one.arrival for one in done]
    itl = [token_latencies(one.chunks) for one in done]
    met = sum(slo.met(first, latencies) for first, latencies in zip(ttft, itl, strict=True))
    totals = [worker.counted() for worker in run.workers]
    pages = [used for one in totals for used in one.pages]
    steps, computed = len(pages), sum(one.prefill_tokens for one in totals)
    queried = sum(one.queried_tokens for one in totals)
    return FleetFigures(
        requests=len(asked), finished=len(done),
        refused=sum(one.outcome == "refused" for one in asked), failed=sum(one.outcome == "failed" for one in asked),
        moved=sum(one.moves > 0 for one in asked),
        tokens_per_second=sum(k for one in streams for time, k in one.chunks if begin <= time < end) / seconds,
        requests_per_second=len(done) / seconds, goodput=met / seconds, attainment=met / max(1, len(asked)),
        ttft=Spread.of(ttft), itl=Spread.of(np.array([one for latencies in itl for one in latencies])),
        in_flight=sum(one.request_steps for one in totals) / max(1, steps),
        pages=float(np.percentile(pages, 99)) if pages else 0.0,
        prefill_tokens=computed,
        preemptions=sum(one.preemptions for one in totals),
        hit_rate=sum(one.hit_tokens for one in totals) / max(1, queried),
        utilization=sum(one.busy for one in totals) / (run.now * len(totals)),
    )  # fmt: skip
