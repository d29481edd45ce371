"""Nothing is compiled while requests wait: a day of them asks for no kernel that the warm-up did not ask for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain, product
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from d2sd.modeling.kv_pool import PoolSizes
from d2sd.policies import PolicyName
from d2sd.runtime import warm_up as module
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits, Request, power_of_two
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.warm_up import PrefillShape, prefill_shapes
from tests.conftest import Once
from tests.runtime.helpers import expected, free_pages, honest, make_engine, some_requests
from tests.runtime.recorded_graphs import RecordedGraphs
from tests.runtime.soak import Thirds
from tests.tiny import HEADS
from tools.cuda import guard

ROOT = Path(__file__).parents[2]
#: Every kind of model, every number of passes; the others are `full`.
DAYS = ("hybrid", "windows"), ("d2sd", "fp8"), ("chain", "exact windows")
OTHERS = (
    ("off", "dense"),
    ("chain", "dense"),
    ("lookup", "windows"),
    ("ddtree", "fp8"),
    ("flex", "dense"),
    ("d2sd", "exact"),
)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("days", [DAYS, OTHERS], ids=["kinds", "others"])
def test_nothing_is_compiled_after_the_warm_up(days: tuple[tuple[str, str], ...], once: Once) -> None:
    folder = once("cuda-guard", guard.build)
    if torch.version.cuda is not None or (folder / "failed").exists():
        pytest.skip("fake CUDA tensors need PyTorch for CPUs, and a compiler for their device guard")
    pytest.importorskip("triton", reason="the extra triton is not installed")
    command = [sys.executable, "-m", "tests.runtime.fake_day", str(folder), "1", *chain(*days)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(days)
    for one in found:
        assert one["warm"] > 30, "the kernels are seen"
        assert {"steps", "prefilled", "hits", "batch 1"} <= one["seen"].keys()
        assert one["late"] == [], one["kind"]


#: Each kind of request: its step has a graph, or one of the reasons to have none.
SAMPLED: tuple[dict[str, Any], ...] = {}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "top_k": 3}
KINDS = [SamplingParams(**sampled, logprobs=reported) for sampled, reported in product(SAMPLED, (None, 2))]
CHANGED = SamplingParams(repetition_penalty=1.2), SamplingParams(1.0, logit_bias={5: 2.0}, logprobs=1)


@pytest.mark.parametrize(
    ("policy", "head"),
    [
        ("hybrid", None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("chain", None), ("hybrid", "pair"), ("hybrid", "injection"))
        ),
    ],
)
def test_no_kind_of_request_waits_for_a_kernel(policy: PolicyName, head: str | None) -> None:
    """One of each, alone; the days below mix them, on larger models and in larger batches."""
    pytest.importorskip("triton", reason="the extra triton is not installed")
    from tests.runtime.meta_gpu import meta_engine, meta_gpu
    from tests.runtime.specialisations import Specialisations

    asked = Specialisations()
    with meta_gpu(asked):
        engine = meta_engine(
            policy, Limits(1, 64, 16, 16), lookup=policy == "hybrid", head=None if head is None else HEADS[head]
        )
        engine.warm_up()
        asked.phase = "day"
        requests = [Request((1, 2, 3), 2, kind) for kind in (*KINDS, *CHANGED)]
        engine.generate([*requests, Request((1, 2, 3), 2, SamplingParams(1.0), grammar=Thirds())])
    assert len(asked.found["warm"]) > 30, "the kernels are seen"
    assert any("pairs_kernel" in one for one in asked.found["warm"]) == (head is not None)
    assert asked.late == []


def shapes_of(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> tuple[list[PrefillShape], Any]:
    """Shapes of a runner whose passes run a kernel for each bucket of rows and of splits."""

    def kernel(_: object, requests: int, rows: int, columns: int, *others: object) -> object:
        return min(rows, 64), min(16, max(1, 132 // (requests * max(1, rows // 16))), columns)

    monkeypatch.setattr(module, "chunk_kernel", kernel)
    runner = honest()
    runner.allocate(PoolSizes(9, 4))
    return prefill_shapes(runner, limits), kernel


@pytest.mark.parametrize("limits", [Limits(16, 8192, 16, 512), Limits(3, 100, 4, 7), Limits(40, 64, 64, 16)])
def test_the_passes_before_the_first_request_run_every_kernel_of_prefills(
    limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, kernel = shapes_of(limits, monkeypatch)
    most, block = min(limits.max_batch, limits.prefill_chunk), honest().block_size
    warmed = {kernel(None, *shape) for shape in shapes}
    pages = 1
    while pages < limits.pages_for(limits.max_context + block):
        for requests in range(1, most + 1):
            for rows in range(1, limits.prefill_chunk - requests + 2):
                if rows <= pages * limits.page_size:  # a table covers the positions of a chunk
                    assert kernel(None, requests, power_of_two(rows), pages) in warmed
        pages *= 2
    assert all(shape.rows <= shape.pages * limits.page_size for shape in shapes), "or a prefill of it is an IndexError"
    assert len(shapes) == len(set(shapes)) <= len(warmed) + 13, "one for each, the largest, and prompts one by one"
    held = power_of_two(limits.pages_for(limits.max_context + block)) * limits.page_size
    assert sum([shapes[-1].rows] + [1] * (shapes[-1].requests - 1)) == min(limits.prefill_chunk, held + most - 1)
    assert all(shape.requests + shape.rows - 1 <= 2 * limits.prefill_chunk for shape in shapes)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["off", "d2sd", "flex_parallel"])
def test_a_warm_engine_serves_as_a_cold_one(policy: PolicyName) -> None:
    """Only the scratch page has been written, nothing waits for drafters, and progress is told."""
    engine = make_engine(honest(case=policy), policy, max_batch=2)
    graphs = RecordedGraphs(rerun=True)
    graphs.guard(engine)
    before, told = free_pages(engine), []

    class Progress:
        def __init__(self, what: str, total: int | None = None) -> None:
            told.append((what, total))

        def __enter__(self) -> Any:
            return lambda count: told.append(count)

        def __exit__(self, *error: object) -> None:
            pass

    engine.warm_up(Progress)
    assert free_pages(engine) == before
    (_, total), *steps = cast("list[Any]", told)
    assert sum(steps) == total
    captured = len(graphs.graphs)
    requests = list(some_requests()[:4])
    assert [one.answer for one in engine.generate(requests)] == [expected(request) for request in requests]
    engine.generate([Request((1, 2), 3, SamplingParams(0.7, top_k=3))])
    assert len(graphs.graphs) == captured, "every graph was captured before"


def test_a_kind_of_step_that_does_not_fit_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server starts: a whole batch of such requests may never come."""
    engine = make_engine(honest(), "off", max_batch=1)
    RecordedGraphs(rerun=True).guard(engine)
    done: list[str] = []

    def too_large() -> None:
        raise torch.OutOfMemoryError("500 GiB")

    monkeypatch.setattr(engine.steps, "warm_ups", lambda served: [too_large, lambda: done.append("next")])
    engine.warm_up()
    assert done == ["next"]
    assert "does not fit in memory: 500 GiB" in caplog.text


def test_a_cpu_does_nothing_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []
    monkeypatch.setattr(ModelRunner, "prefill", lambda *inputs: ran.append(inputs))
    monkeypatch.setattr(ModelRunner, "verify", lambda *inputs: ran.append(inputs))
    make_engine(honest(), "d2sd").warm_up()
    assert not ran
