"""The engine alone, in this process: what the server is compared with, and speculation with parameters on.

Time is the processor time of this process: on a machine with other work wall time says more about that work.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pydantic import BaseModel

from benchmarks.load.answers import compare
from benchmarks.load.client import Reply
from benchmarks.load.server import Server
from benchmarks.load.traffic import closed_loop
from benchmarks.load.workloads import Conversation, own_prompts, single
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.bundle.requests import chat_request, each_completion
from d2sd.bundle.serving import make_engine
from d2sd.errors import D2SDError
from d2sd.progress import bar
from d2sd.recipe import Policy
from d2sd.runtime.engine import Engine
from d2sd.runtime.grammar.forms import StructuredOutputsParams
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence as Running
from d2sd.serve.structured import GrammarCompiler

_SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 200}, "certain": {"type": "boolean"}},
    "required": ["answer", "certain"],
    "additionalProperties": False,
}
#: Parameters by name; each is measured at T = 0 and T = 0.8.
PARAMETERS: dict[str, dict[str, Any]] = {
    "none": {},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "top-p": {"top_p": 0.9, "top_k": 50},
    "JSON schema": {"structured_outputs": StructuredOutputsParams(json=_SCHEMA)},
}
TEMPERATURES = (0.0, 0.8)


class Passed(NamedTuple):
    """One pass over some requests."""

    cpu: float  # seconds
    wall: float
    tokens: int
    answers: list[list[int]]
    policies: Counter[str]  # policy -> steps of a request


def requests_of(bundle: Bundle, count: int, params: SamplingParams, seed: int = 0) -> list[Request]:
    """d2sd's own prompts as requests of an engine."""
    form, compiler = params.structured_outputs, GrammarCompiler(bundle)
    grammar = None if form is None else compiler.compile(form)
    assert params.max_tokens is not None
    made = []
    for number, text in enumerate(own_prompts(count)):
        request = chat_request(bundle, text, params.with_seed(seed + number), params.max_tokens)
        made += each_completion(replace(request, grammar=grammar))
    return made


class _Pass:
    """A pass of an engine over some requests, `in_flight` at a time, a step at a time."""

    def __init__(self, engine: Engine, requests: Sequence[Request], in_flight: int) -> None:
        self._engine, self._waiting, self._in_flight = engine, deque(requests), in_flight
        self._sequences: list[Running] = []
        self._running = 0
        self.cpu = self.wall = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        while self._waiting and self._running < self._in_flight:
            self._sequences.append(self._engine.submit(self._waiting.popleft()))
            self._running += 1
        self._running -= sum(output.finish is not None for output in self._engine.step())
        self.cpu += time.process_time() - cpu
        self.wall += time.perf_counter() - wall

    def passed(self) -> Passed:
        answers = [sequence.answer for sequence in self._sequences]
        policies = sum((sequence.stats.policies for sequence in self._sequences), Counter[str]())
        return Passed(self.cpu, self.wall, sum(map(len, answers)), answers, policies)


def run(engine: Engine, requests: Sequence[Request], in_flight: int) -> Passed:
    """Answer all requests, `in_flight` at a time."""
    return run_together({"": engine}, requests, in_flight)[""]


def run_together(engines: dict[str, Engine], requests: Sequence[Request], in_flight: int) -> dict[str, Passed]:
    """The same pass by every engine, in turns of a step: a machine that is slow for a second is slow for all."""
    passes = {name: _Pass(engine, requests, in_flight) for name, engine in engines.items()}
    while busy := [one for one in passes.values() if one.busy]:
        min(busy, key=lambda one: one.cpu).step()
    return {name: one.passed() for name, one in passes.items()}


class Comparison(BaseModel):
    """`auto` against plain decoding on the same requests."""

    parameters: str
    temperature: float
    in_flight: int
    tokens: int
    plain_tokens_per_second: float  # of processor time, median
    auto_tokens_per_second: float
    speedup: float  # median over the passes of plain / auto processor time; a pass of both is made in turns of a step
    policies: dict[str, int]  # steps of a request under auto, by the policy that it chose


def compare_policies(
    folder: Path, names: Sequence[str], in_flight: Sequence[int], requests: int, max_tokens: int, repeat: int
) -> list[Comparison]:
    """Measure every set of parameters at every concurrency, both policies in turns of a step.

    Raises D2SDError if an answer differs from plain decoding's.
    """
    bundle, found = load_bundle(folder, progress=bar), []
    for amount in in_flight:
        engines = {name: _engine(bundle, name, amount) for name in ("off", "auto")}
        for name in names:
            for temperature in TEMPERATURES:
                found.append(_compare(bundle, engines, name, temperature, amount, requests, max_tokens, repeat))
    return found


def _engine(bundle: Bundle, policy: Policy, in_flight: int) -> Engine:
    return make_engine(bundle, policy=policy, max_batch=in_flight, prefix_cache=False)


def _compare(
    bundle: Bundle,
    engines: dict[str, Engine],
    name: str,
    temperature: float,
    in_flight: int,
    requests: int,
    max_tokens: int,
    repeat: int,
) -> Comparison:
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, **PARAMETERS[name])
    asked = requests_of(bundle, max(requests, in_flight), params)
    passes: dict[str, list[Passed]] = {policy: [] for policy in engines}
    with bar(f"{name}, T = {temperature:g}, {in_flight} in flight", repeat + 1) as advance:
        for number in range(repeat + 1):
            for policy, done in run_together(engines, asked if number else asked[:in_flight], in_flight).items():
                if number:  # the first pass warms up
                    passes[policy].append(done)
            advance(1)
    off, auto = passes["off"], passes["auto"]
    for plain, one in zip(off, auto, strict=True):
        if plain.answers != one.answers:
            raise D2SDError(
                "speculation changed an answer", where=f"{name}, T = {temperature:g}, {in_flight} in flight"
            )
    return Comparison(
        parameters=name,
        temperature=temperature,
        in_flight=in_flight,
        tokens=off[0].tokens,
        plain_tokens_per_second=median(one.tokens / one.cpu for one in off),
        auto_tokens_per_second=median(one.tokens / one.cpu for one in auto),
        speedup=median(plain.cpu / one.cpu for plain, one in zip(off, auto, strict=True)),
        policies=dict(sum((one.policies for one in auto), Counter[str]())),
    )


class Overhead(BaseModel):
    """A server against the engine alone, on the same requests: medians over passes that were made in turn."""

    policy: str
    in_flight: int
    tokens: int
    engine_tokens_per_second: float  # wall time
    server_tokens_per_second: float
    wall: float  # server / engine - 1; the client shares the machine
    cpu: float  # the same of the processor time of both processes
    threads: float  # of the server alone: processor time of all its processes over that of the engine's thread, less 1


def measure_overhead(
    kind: type[Server],
    folder: Path,
    out: Path,
    policies: Sequence[Policy],
    in_flight: int,
    requests: int,
    max_tokens: int,
    repeat: int,
) -> list[Overhead]:
    """Answer the same requests through a server and by an engine in this process; D2SDError if answers differ."""
    bundle, found = load_bundle(folder, progress=bar), []
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    asked = requests_of(bundle, requests, params)
    talks = single(requests, {"temperature": 0.0, "max_tokens": max_tokens})
    for policy in policies:
        engine = make_engine(bundle, policy=policy, max_batch=in_flight)
        options = ["--policy", policy, "--max-batch", str(in_flight)]
        with kind.start(folder, out / f"server-overhead-{policy}.log", options) as server:
            alone, served, threads = [], [], []
            for number in range(repeat + 1):
                before = server.thread_seconds()
                if number % 2:  # ABBA: a drift of the machine cancels
                    one, (other, replies) = run(engine, asked, in_flight), asyncio.run(_ask(server, talks, in_flight))
                else:
                    (other, replies), one = asyncio.run(_ask(server, talks, in_flight)), run(engine, asked, in_flight)
                spent = {thread: now - before.get(thread, 0.0) for thread, now in server.thread_seconds().items()}
                texts = [bundle.tokenizer.decode(ids, skip_special_tokens=True) for ids in one.answers]
                compare(replies, texts, f"{policy}, against the engine")
                if number:  # the first pass warms up
                    alone.append(one)
                    served.append(other)
                    threads.append(other.cpu / max(spent.values()) - 1)  # the engine's is the busiest
        pairs = list(zip(served, alone, strict=True))
        found.append(
            Overhead(
                policy=policy,
                in_flight=in_flight,
                tokens=alone[0].tokens,
                engine_tokens_per_second=median(one.tokens / one.wall for one in alone),
                server_tokens_per_second=median(one.tokens / one.wall for one in served),
                wall=median(a.wall / b.wall for a, b in pairs) - 1,
                cpu=median(a.cpu / b.cpu for a, b in pairs) - 1,
                threads=median(threads),
            )
        )
    return found


async def _ask(server: Server, talks: Sequence[Conversation], in_flight: int) -> tuple[Passed, list[Reply]]:
    async with server.connect() as client:
        before = server.cpu_seconds()
        replies, seconds = await closed_loop(client, talks, in_flight)
        after = server.cpu_seconds()
    assert before is not None
    assert after is not None
    return Passed(after - before, seconds, sum(reply.tokens for reply in replies), [], Counter()), replies
