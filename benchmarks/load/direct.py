"""The server against the engine alone, in this process."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pydantic import BaseModel

from benchmarks.load.answers import compare
from benchmarks.load.client import Reply
from benchmarks.load.server import Server
from benchmarks.load.traffic import closed_loop
from benchmarks.load.workloads import Conversation, own_prompts, single
from d2sd.bundle.load import load_bundle
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import make_engine
from d2sd.progress import bar
from d2sd.recipe import Policy
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams


class Passed(NamedTuple):
    """One pass over some requests."""

    cpu: float  # seconds
    wall: float
    tokens: int
    answers: list[list[int]]


def run(engine: Engine, requests: Sequence[Request], in_flight: int) -> Passed:
    """Answer all requests, `in_flight` at a time."""
    waiting, sequences, running = deque(requests), [], 0
    cpu, wall = time.process_time(), time.perf_counter()
    while waiting or running:
        while waiting and running < in_flight:
            sequences.append(engine.submit(waiting.popleft()))
            running += 1
        running -= sum(output.finish is not None for output in engine.step())
    answers = [sequence.answer for sequence in sequences]
    return Passed(time.process_time() - cpu, time.perf_counter() - wall, sum(map(len, answers)), answers)


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
    sampling = [SamplingParams(seed=seed) for seed in range(requests)]
    prompts = zip(own_prompts(requests), sampling, strict=True)
    asked = [chat_request(bundle, text, params, max_tokens) for text, params in prompts]
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
    return Passed(after - before, seconds, sum(reply.tokens for reply in replies), []), replies
