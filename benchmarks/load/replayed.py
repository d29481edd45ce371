"""The engine and the simulation on the same requests: how far is the simulation off?

Times are processor time of this process, in which the engine runs alone with one thread: on a machine with other work
wall time says more about that work. Acceptance was measured on the same prompts, and `auto` serves what it served when
the costs were measured: what is checked is the time model, the scheduling and the batching.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel

from benchmarks.load.direct import requests_of
from d2sd.bench.fleet.accepted import DRAWS
from d2sd.bench.fleet.costs import EngineCosts, WorkerModel
from d2sd.bench.fleet.simulate import Fleet, Simulation
from d2sd.bench.fleet.worker import Stream
from d2sd.bench.latency import Spread, token_latencies
from d2sd.bundle.load import Bundle
from d2sd.bundle.serving import auto_policies, candidate_policies, make_engine
from d2sd.recipe import Policy
from d2sd.runtime.engine import Engine
from d2sd.runtime.policy_selector import PolicySelector
from d2sd.runtime.request import Request
from d2sd.runtime.sequence import Sequence as Running
from d2sd.runtime.step_times import StepTimes
from d2sd.serve.params import SamplingParams


class Figures(BaseModel):
    """One closed loop."""

    tokens: int
    tokens_per_second: float
    steps: int  # decode steps of a request
    ttft: Spread
    itl: Spread

    @classmethod
    def of(cls, streams: Sequence[Stream], seconds: float) -> Figures:
        tokens = sum(one.delivered for one in streams)
        return cls(
            tokens=tokens, tokens_per_second=tokens / seconds, steps=sum(len(one.chunks) for one in streams),
            ttft=Spread.of([one.chunks[0][0] - one.arrival for one in streams]),
            itl=Spread.of([latency for one in streams for latency in token_latencies(one.chunks)]),
        )  # fmt: skip


class Check(BaseModel):
    """One policy at one concurrency."""

    policy: str
    concurrency: int
    measured: Figures
    simulated: Figures

    def errors(self) -> dict[str, float]:
        """Simulated over measured, less 1."""
        pairs = {
            "tokens/s": (self.simulated.tokens_per_second, self.measured.tokens_per_second),
            "TTFT p50": (self.simulated.ttft.p50, self.measured.ttft.p50),
            "TTFT p99": (self.simulated.ttft.p99, self.measured.ttft.p99),
            "ITL mean": (self.simulated.itl.mean, self.measured.itl.mean),
            "ITL p99": (self.simulated.itl.p99, self.measured.itl.p99),
        }
        return {name: simulated / measured - 1 for name, (simulated, measured) in pairs.items()}


def check(bundle: Bundle, policy: Policy, costs: EngineCosts, concurrency: int, requests: int, tokens: int) -> Check:
    """Run the engine and then the simulation."""
    selector = _selector(bundle, costs) if policy == "auto" else None
    engine = make_engine(bundle, policy=policy, prefix_cache=False, selector=selector)
    asked = requests_of(bundle, requests, SamplingParams(temperature=0.0, max_tokens=tokens))
    engine.generate([asked[0]] * min(2, concurrency))  # warm-up
    passes = [_serve(engine, asked, concurrency) for _ in range(2)]
    served, seconds = min(passes, key=lambda one: one[1])  # other work on the machine only adds
    draw = np.random.default_rng(0)
    streams = [
        Stream(one.id, 0.0, one.prompt, one.delivered, one.id, draw.integers(DRAWS, size=one.delivered).tolist())
        for one in served
    ]
    fleet = Fleet(limits=engine.limits, pages=engine.memory.pages)
    run = Simulation(WorkerModel(costs), fleet)
    run.run(streams, concurrency)
    return Check(
        policy=policy, concurrency=concurrency, measured=Figures.of(served, seconds),
        simulated=Figures.of(streams, run.now),
    )  # fmt: skip


def _selector(bundle: Bundle, costs: EngineCosts) -> PolicySelector:
    """Chooses at every batch size what the costs say is served there."""
    tree = bundle.recipe.tree
    names = set(costs.policies) | {"off"}
    known = [p for p in candidate_policies(tree, tree.row_budget, auto_policies(bundle)) if str(p) in names]
    never = 1e9
    seconds = {(one, size): 1.0 if str(one) == name else never for one in known for size, name in costs.served.items()}
    return PolicySelector(known, StepTimes.of(seconds), {})


def _serve(engine: Engine, requests: Sequence[Request], concurrency: int) -> tuple[list[Stream], float]:
    """A closed loop; what each client received, and the seconds of the whole."""
    waiting, running, streams = deque(enumerate(requests)), dict[Running, Stream](), list[Stream]()
    begun = time.process_time()
    while waiting or running:
        while waiting and len(running) < concurrency:
            number, request = waiting.popleft()
            arrival = time.process_time() - begun
            stream = Stream(number, arrival, request.prompt, request.max_new_tokens, number, [])
            running[engine.submit(request)] = stream
            streams.append(stream)
        outputs = engine.step()
        now = time.process_time() - begun
        for output in outputs:
            stream = running[output.sequence]
            stream.chunks.append((now, len(output.tokens)))
            stream.delivered += len(output.tokens)
            if output.finish is not None:
                del running[output.sequence]
    return streams, time.process_time() - begun
