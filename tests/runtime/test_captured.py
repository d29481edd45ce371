"""Captured steps give the tokens and pages of steps that run operator by operator, whatever overwrites their memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

import pytest
import torch

from d2sd.errors import D2SDError
from d2sd.policies import NAMES, PolicyName
from d2sd.runtime.backends.model_runner import ModelRunner
from d2sd.runtime.batch import Batch
from d2sd.runtime.engine import Engine
from d2sd.runtime.handover import Link
from d2sd.runtime.request import Request, SamplingParams
from d2sd.runtime.speculation.policy import make_policy
from d2sd.runtime.static_inputs import StaticInputs
from tests.runtime.helpers import (
    BLOCK,
    BRANCHES,
    BUDGET,
    GREEDY,
    all_pages,
    check_pages,
    copies,
    expected,
    free_pages,
    honest,
    make_engine,
    plain,
)
from tests.runtime.knowing import Knowing
from tests.runtime.recorded_graphs import RecordedGraphs

HOT, NARROW = SamplingParams(1.0, seed=1), SamplingParams(0.8, top_p=0.9, seed=2)


@pytest.fixture(autouse=True)
def layers_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the compiled layers of a CPU hide their operators."""
    monkeypatch.setattr("d2sd.plugins.cpu.library.available", lambda: False)


def knowing(requests: Sequence[Request]) -> Knowing:
    texts = {r.sampling.seed: [*r.prompt, *plain(r.prompt, r.sampling, r.max_new_tokens + BLOCK)] for r in requests}
    return Knowing(*copies(), texts)


def some(count: int, *kinds: SamplingParams, length: int = 14, seed: int = 0) -> list[Request]:
    """Requests of different lengths; every third has the prompt of the one before it and more, for prefix hits."""
    dice, found = random.Random(seed), list[Request]()
    for index in range(count):
        prompt = tuple(dice.randrange(64) for _ in range(dice.randrange(1, 14)))
        if index % 3 == 2:
            prompt = found[-1].prompt + prompt[:3]
        kind = kinds[index % len(kinds)]
        params = SamplingParams(kind.temperature, kind.top_p, kind.top_k, seed=1 + index + 100 * seed)
        found.append(Request(prompt, dice.randrange(2, length), params))
    return found


def captured(runner: ModelRunner, policy: PolicyName = "d2sd", **settings: int | None) -> tuple[Engine, RecordedGraphs]:
    graphs = RecordedGraphs()
    return graphs.guard(make_engine(runner, policy, **settings)), graphs  # type: ignore[arg-type]


def served(engine: Engine, requests: Sequence[Request], policies: Sequence[PolicyName], dice: random.Random) -> None:
    """Serve requests that join and leave, every step by one of `policies`; all answers and pages are right."""
    made = [make_policy(name, block_size=BLOCK, branches=BRANCHES, row_budget=BUDGET) for name in policies]
    sequences, waiting = [], list(requests)
    for step in range(100 * len(requests)):
        if waiting and (not engine.busy or dice.random() < 0.4):
            sequences.append(engine.submit(waiting.pop(0)))
        engine.policy = made[step // 3 % len(made)]
        engine.step()
        if step % 10 == 9:
            for one in engine.scheduler.running:
                check_pages(engine.runner, torch.tensor(one.pages), one.tokens[: one.cached])
        if not waiting and not engine.busy:
            break
    assert [s.answer for s in sequences] == [expected(r) for r in requests]
    assert free_pages(engine) == all_pages(engine)


def test_policies_take_turns_on_poisoned_memory() -> None:
    """Drafters that wait, requests that join and leave, prefix hits, preemption; two thirds of the drafts are right."""
    requests = some(5, GREEDY, NARROW, length=10)
    engine, graphs = captured(knowing(requests), max_batch=2, pages=8)
    served(engine, requests, ("chain", "d2sd", "off"), random.Random(3))
    assert graphs.replays == engine.stats.steps > 12
    assert engine.stats.prefix_hit_tokens > 0


def test_every_kind_of_sampling_has_its_graph() -> None:
    """One for all combinations of filters; a step of each is like that of an engine without graphs."""
    kinds = (HOT, NARROW, GREEDY, SamplingParams(0.9, top_k=3, min_p=0.05))
    requests = [Request((5, 6), 3, replace(kind, seed=9)) for kind in kinds]
    engine, graphs = captured(honest(), "off", max_batch=1)
    assert [s.answer for s in engine.generate(requests)] == [expected(r) for r in requests]
    assert len(graphs.graphs) == 3
    assert graphs.replays == engine.stats.steps


def test_steps_of_varying_shapes_run_without_a_graph() -> None:
    """Beside a request with a penalty, and alone again; their drafters' context is in the queues in between."""
    loud = Request((1, 2, 3), 4, SamplingParams(repetition_penalty=1.5, logprobs=2, seed=4))
    request = Request((7, 8), 9, SamplingParams(seed=5))
    alone = make_engine(honest(), "chain").generate([loud, request])
    engine, graphs = captured(honest(), "chain", max_batch=2)
    found = engine.generate([loud, request])
    assert [s.answer for s in found] == [s.answer for s in alone]
    assert 0 < graphs.replays < engine.stats.steps
    assert len(found[0].logprobs) == 4


def test_unused_pages_of_a_longer_request_before_are_padding() -> None:
    longer = Batch.dummy(1, 3, 0, 64, "cpu")
    inputs = StaticInputs(longer, None, 4, "cpu")
    for pages, wanted in ((3, [5, 5, 5, 0]), (1, [5, 0, 0, 0])):
        inputs.load(replace(longer, page_table=torch.full((1, pages), 5)), Link.pack([], 1), None)
        assert inputs.batch(longer.sampling).page_table.tolist() == [wanted]


def test_a_refused_capture_is_told_once_or_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(run: Callable[[], object]) -> NoReturn:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(runner := honest(), "capture", refuse)
    request = Request((5, 6), 3, GREEDY)
    engine = make_engine(runner, "off", max_batch=1)
    assert [s.answer for s in engine.generate([request] * 2)] == [expected(request)] * 2
    told = "d2sd: decode steps run without CUDA graphs: RuntimeError: operation not permitted\n"
    assert capsys.readouterr().err.count(told) == 1
    monkeypatch.setenv("D2SD_NO_FALLBACK", "1")
    with pytest.raises(D2SDError, match="cannot be captured"):
        make_engine(runner, "off", max_batch=1).generate([request])


@pytest.mark.parametrize("policy", ["off", pytest.param("lookup", marks=pytest.mark.slow)])
def test_after_a_warm_up_nothing_is_captured(policy: PolicyName) -> None:
    requests = [Request((5, 6, 5), 4, replace(kind, seed=9)) for kind in (HOT, NARROW, GREEDY)]
    engine, graphs = captured(honest(), policy, max_batch=2)
    engine.steps.warm_up([(engine.policy, 1), (engine.policy, 2)])
    assert len(graphs.graphs) == 2 * 3
    assert [s.answer for s in engine.generate(requests)] == [expected(r) for r in requests]
    assert len(graphs.graphs) == 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("turns", [*((name,) for name in NAMES), NAMES, ("chain", "hybrid"), ("off",) * 7 + ("d2sd",)])
@pytest.mark.parametrize("pages", [None, 14])
def test_every_policy_on_poisoned_memory(turns: Sequence[PolicyName], pages: int | None) -> None:
    """With 14 pages for three requests, some are preempted."""
    requests = some(14, GREEDY, NARROW, HOT, GREEDY, length=26, seed=1)
    engine, graphs = captured(knowing(requests), max_batch=3, pages=pages)
    served(engine, requests, turns, random.Random(5))
    assert graphs.replays == engine.stats.steps > 30
    assert engine.stats.prefix_hit_tokens > 0
    assert (engine.stats.preemptions > 0) == (pages is not None)
