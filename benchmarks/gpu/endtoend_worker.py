"""One engine of one policy in a process of its own, for `endtoend`: JSON lines in, JSON lines that begin with @ out.

    python -m benchmarks.gpu.endtoend_worker '{"bundle": ..., "method": "hybrid", "nodes": 64, "requests": FILE, ...}'

It makes the engine and compiles and captures all that greedy and sampled requests need, says that it is ready, and
then does what each line says, while no other process uses the GPU. Products are PyTorch's.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch

from benchmarks.gpu.steps import in_a_row
from d2sd.build.validate.near_ties import top2_margin
from d2sd.bundle import product_times
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.bundle.serving import forecasts, make_engine
from d2sd.plugins.compilations import watch_compilations
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Request, buckets
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.stats import SequenceStats
from d2sd.runtime.step_times import StepTimer
from d2sd.runtime.warm_up import warm_up

#: Tokens of context of the steps that are timed on the device.
_CONTEXT = 256


def in_mode(bundle: Bundle, *, exact: bool) -> Bundle:
    """The bundle with batch-invariant steps, or without."""
    recipe = bundle.recipe.model_copy(update={"exact": exact})
    return replace(bundle, manifest=bundle.manifest.model_copy(update={"recipe": recipe}))


class Worker:
    """An engine and the requests that it can be asked for."""

    def __init__(self, given: dict[str, Any], bundle: Bundle | None = None) -> None:
        self.given, self.began = given, time.perf_counter()
        self.prompts = json.loads(Path(given["requests"]).read_text())
        self.bundle = bundle or in_mode(load_bundle(Path(given["bundle"]), verify=False), exact=given["exact"])
        self.compiled = 0
        most = given["most"]
        self.engine = self.engine_of(self.bundle, given["method"], given["nodes"], given["device"], most)
        self.loaded = time.perf_counter()
        with torch.inference_mode():
            warm_up(self.engine.runner, self.engine.steps, self.engine.limits, ())  # prompts
        watch_compilations(self._compiled)
        self.run(self._requests(most, 4, SamplingParams()), most)
        if given["sampled"]:
            self.run(self._requests(most, 4, SamplingParams(1.0, seed=1)), most)
        self.device_ms: dict[str, float] = {}
        if self.engine.selector is None:
            self.steps(buckets(most))  # captures them

    @staticmethod
    def engine_of(bundle: Bundle, method: str, nodes: int, device: str, most: int) -> Engine:
        """An engine for up to `most` requests; `nodes` 1: as the recipe has it."""
        given: dict[str, Any] = {"policy": method, "row_budget": nodes} if nodes > 1 else {"policy": method}
        # Other processes use the GPU now: forms of products could not be told apart.
        with patch.object(product_times, "choose_products", lambda *_: None):
            return make_engine(bundle, lookup=False, device=device, max_batch=most, **given)

    def _compiled(self, name: str) -> None:
        self.compiled += 1

    def say(self, **answer: Any) -> None:
        print("@" + json.dumps(answer), flush=True)

    def ready(self) -> None:
        now = time.perf_counter()
        self.say(ready=True, load_s=self.loaded - self.began, warm_s=now - self.loaded, compiled=self.compiled)

    @torch.inference_mode()
    def steps(self, sizes: Iterable[int]) -> dict[str, float]:
        """Milliseconds of a captured step by batch size, replayed in a row: what the device alone needs."""
        engine, found = self.engine, dict[str, float]()
        timer = StepTimer(engine.runner, engine.limits, engine.steps)
        for size in sorted(sizes, reverse=True):
            batch = timer.batch(size, _CONTEXT)
            graph = engine.steps.graph_for(engine.policy, batch)
            if graph is not None:
                found[str(size)] = in_a_row(partial(engine.steps.run, engine.policy, batch, graph=graph))
        return found

    def flights(self, at: dict[str, int], tokens: int) -> list[dict[str, Any]]:
        """Serve the first `at[n]` prompts with n in flight, for each n."""
        selector, file = self.engine.selector, self.bundle.calibration
        if selector is None and not self.device_ms:  # measured now, while nothing else runs
            self.device_ms = self.steps(map(int, at))
        elif selector is not None and not self.device_ms:
            assert file is not None
            self.engine.enable_auto(selector.policies, forecasts(file))
            assert self.engine.selector is not None
            times = self.engine.selector.times.seconds
            self.device_ms = {f"{policy} x{size}": 1000 * seconds for (policy, size), seconds in times.items()}
        found = []
        for in_flight, count in at.items():
            self.compiled = 0
            found.append(self.run(self._requests(count, tokens, SamplingParams()), int(in_flight)))
            found[-1]["compiled"] = self.compiled
        return found

    def run(self, requests: list[Request], in_flight: int) -> dict[str, Any]:
        """Answers, seconds, and what the steps accepted."""
        engine, waiting = self.engine, deque(requests)
        engine.selector = engine.selector and engine.selector.fresh()
        sequences, live, steps = [], 0, engine.clock.steps
        engine.clock.seconds.clear()
        begun = time.perf_counter()
        while waiting or engine.busy:
            while waiting and live < in_flight:
                sequences.append(engine.submit(waiting.popleft()))
                live += 1
            live -= sum(output.finish is not None for output in engine.step())
        seconds = time.perf_counter() - begun
        totals = SequenceStats.merged(sequence.stats for sequence in sequences)
        accepted = list(totals.accepted.elements())
        return {
            "in_flight": in_flight,
            "seconds": seconds,
            "tokens": sum(len(sequence.answer) for sequence in sequences),
            "steps": engine.clock.steps - steps,
            "tau": sum(accepted) / max(1, len(accepted)),
            "policies": dict(totals.policies),
            "host": {name: round(s, 4) for name, s in engine.clock.seconds.items()},
            "answers": [sequence.answer for sequence in sequences],
        }

    def answers(self, in_flight: int, temperature: float, count: int, tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature)
        return cast("list[list[int]]", self.run(self._requests(count, tokens, sampling), in_flight)["answers"])

    def gaps(self, cases: list[tuple[int, list[int]]]) -> list[float]:
        """Gap of the two best logits behind prompt and tokens of each case."""
        with torch.inference_mode():
            target = self.bundle.target.to(self.given["device"])
            return [top2_margin(target, [*self.prompts["ids"][prompt], *tokens]) for prompt, tokens in cases]

    def _requests(self, count: int, tokens: int, sampling: SamplingParams) -> list[Request]:
        """The salt keeps prompts out of the prefix cache: each is computed when it is measured."""
        salt, stops = str(time.perf_counter()), frozenset(self.prompts["stop"])
        return [
            Request(tuple(ids), tokens, replace(sampling, seed=seed), stops, cache_salt=salt)
            for seed, ids in enumerate(self.prompts["ids"][:count])
        ]


def main() -> None:
    """Do what the lines of standard input say until it ends."""
    worker = Worker(json.loads(sys.argv[1]))
    worker.ready()
    for line in sys.stdin:
        asked = json.loads(line)
        do: Callable[..., Any] = getattr(worker, asked.pop("do"))
        try:
            worker.say(result=do(**asked), device_ms=worker.device_ms)
        except Exception as error:
            worker.say(error=f"{type(error).__name__}: {error}"[:500])
    engine: Engine = worker.engine
    engine.runner.close()


if __name__ == "__main__":
    main()
