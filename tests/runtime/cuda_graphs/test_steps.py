"""Captured steps give the tokens and pages of steps that run operator by operator, whatever overwrites their memory."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any, NoReturn, cast

import pytest
import torch

from d2sd.errors import D2SDError
from d2sd.modeling.where import Where
from d2sd.plugins.trees import Accepted
from d2sd.runtime import decode
from d2sd.runtime.batch import Batch
from d2sd.runtime.cuda_graphs.inputs import STOP_TOKENS, Link, StaticInputs
from d2sd.runtime.cuda_graphs.steps import Handover
from d2sd.runtime.decode import Drafted, StepResult
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.speculation.policy import make_policy
from d2sd.token_codes import NOT_FINITE
from tests.runtime.cheating import Knowing
from tests.runtime.helpers import (
    BLOCK,
    BRANCHES,
    BUDGET,
    GREEDY,
    all_pages,
    check_pages,
    expected,
    free_pages,
    honest,
    make_engine,
    placed,
    plain,
)
from tests.runtime.recorded_graphs import RecordedGraphs
from tests.tiny import policy_name

pytestmark = pytest.mark.usefixtures("layers_of_pytorch")

HOT, NARROW = SamplingParams(1.0, seed=1), SamplingParams(0.8, top_p=0.9, seed=2)


def knowing(requests: SequenceOf[Request]) -> Knowing:
    texts = {r.seed: [*r.prompt, *plain(r.prompt, r.sampling, r.max_new_tokens + BLOCK)] for r in requests}
    return Knowing(*placed(), texts)


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


def captured(runner: ModelRunner, policy: str = "d2sd", **settings: int | None) -> tuple[Engine, RecordedGraphs]:
    graphs = RecordedGraphs()
    return graphs.guard(make_engine(runner, policy, **settings)), graphs  # type: ignore[arg-type]


def served(engine: Engine, requests: SequenceOf[Request], policies: SequenceOf[str], dice: random.Random) -> None:
    """Serve requests that join and leave, every step by one of `policies`; all answers and pages are right."""
    engine.runner.keep_text()
    sizes = {"block_size": BLOCK, "branches": BRANCHES, "row_budget": BUDGET}
    made = [make_policy(policy_name(name), **sizes, lookup=True) for name in policies]
    sequences, waiting = [], list(requests)
    for step in range(100 * len(requests)):
        if waiting and (not engine.busy or dice.random() < 0.4):
            sequences.append(engine.submit(waiting.pop(0)))
        engine.policy = made[step // 3 % len(made)]
        engine.step()
        if step % 10 == 9:
            for one in (one for one in engine.scheduler.running if one.cached):
                check_pages(engine.runner, torch.tensor(one.pages), one.tokens[: one.cached])
        if not waiting and not engine.busy:
            break
    assert [s.answer for s in sequences] == [expected(r) for r in requests]
    assert free_pages(engine) == all_pages(engine)


@pytest.mark.slow
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
    """Two buffers take turns, so each is filled by a long request and then by a short one."""
    longer = Batch.dummy(Where.scratch(1, 3, windowed=True), 64, "cpu")
    inputs = StaticInputs(longer, 4, "cpu")
    for pages in (3, 3, 1, 1, 4, 2, 2, 1):
        table = torch.full((1, pages), 5)
        inputs.load(replace(longer, where=longer.where.with_tables([table, table + 1])), Link.pack([], 1))
        loaded = inputs.batch(longer.sampling)
        assert loaded.where.pages.tolist() == [[5] * pages + [0] * (4 - pages)]
        assert loaded.where.windowed is not None
        assert loaded.where.windowed.tolist() == [[6] * pages + [0] * (4 - pages)]


def test_buffers_of_two_steps_take_turns() -> None:
    """The copy of the first to the device may not have begun when the second is packed."""
    batch = Batch.dummy(Where.scratch(1, 1), 64, "cpu")
    inputs = StaticInputs(batch, 1, "cpu")
    held = []
    for anchor in (5, 6):
        inputs.load(replace(batch, anchor=batch.anchor + anchor), Link.pack([], 1))
        held.append(inputs._device.clone())
    buffers = [next(inputs._hosts).whole for _ in range(2)]
    assert [buffer.tolist() for buffer in buffers] == [one.tolist() for one in held]
    assert held[0].tolist() != held[1].tolist()


def test_a_step_is_launched_before_the_one_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a request needs the host: then all tokens are read first, and again afterwards. No call reads two steps."""
    engine, graphs = captured(honest(), "off", max_batch=2)
    done: list[str] = []

    def fetch(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        copy = tensor.clone()
        done.append("launch")

        def read() -> torch.Tensor:
            done.append("read")
            return copy

        return read

    monkeypatch.setattr(graphs, "fetch", fetch)
    first = engine.submit(Request((5, 6), 12, GREEDY))
    for _ in range(3):
        engine.step()
    assert done == ["launch"] * 2 + ["read", "launch", "read"]
    second = engine.submit(Request((7, 8), 3, SamplingParams(logprobs=1)))
    while second.finish is None:
        engine.step()
    assert done[5:] == ["read"] + ["launch", "read"] * 3
    while engine.busy:
        engine.step()
    assert done[12:14] == ["launch", "launch"]
    assert done.count("launch") == 12, "no step runs for a token that is known to be the last"
    assert first.answer == expected(first.request)


def test_the_device_ends_answers_like_the_host() -> None:
    """Random steps of a batch, and what a loop over its rows makes of them."""
    dice, block, rows = random.Random(1), 4, 4
    handover = Handover(rows, "cpu")
    before, seen = list[Sequence](), Counter[bool]()
    state: dict[int, tuple[int, int, bool]] = {}
    for _ in range(300):
        sequences = dice.sample(before, dice.randrange(len(before) + 1))
        while len(sequences) < 3:
            stop = frozenset(dice.sample(range(9), dice.choice((0, 2, STOP_TOKENS - 1))))
            sequences.append(Sequence(0, Request((1,) * dice.randrange(1, 5), 12, stop_tokens=stop), [7]))
        lengths = torch.tensor([len(s.request.prompt) - 1 for s in sequences] + [0])
        dummy, active = Batch.dummy(Where.scratch(rows, 1), 64, "cpu"), torch.tensor([True] * 3 + [False])
        where = replace(dummy.where, context_len=lengths)
        batch = replace(dummy, active=active, anchor=torch.full((rows,), 60), where=where)
        link = Link.pack(sequences, rows, before)
        own = handover.begin(batch, link)
        for row, one in enumerate(sequences):
            fresh = 60, len(one.request.prompt) - 1, True
            wanted = state[id(one)] if one in before else fresh
            assert (int(own.anchor[row]), int(own.where.context_len[row]), bool(own.active[row])) == wanted
            seen[wanted[2]] += 1
        assert not own.active[3]
        count = torch.tensor([dice.randrange(1, block + 1) for _ in range(rows)])
        tokens = torch.tensor([[dice.randrange(40) for _ in range(block)] for _ in range(rows)])
        broken = dice.randrange(3 * rows)  # its logits are not finite: nothing follows, and the anchor stays a token
        if broken < rows:
            tokens[broken, count[broken] - 1] = NOT_FINITE
        accepted = Accepted(torch.zeros_like(tokens), count, tokens, torch.zeros_like(count))
        result = StepResult(cast(Drafted, None), accepted, accepted.packed())
        handover.end(own, link, result)
        state = {}
        for row, one in enumerate(sequences):
            taken = tokens[row, : count[row]].tolist()
            length = int(own.where.context_len[row]) + len(taken)
            ended = bool(one.request.stop_tokens & set(taken)) or length - len(one.request.prompt) + 1 >= 12
            ended |= taken[-1] == NOT_FINITE
            state[id(one)] = max(taken[-1], 0), length, bool(own.active[row]) and not ended
        before = sequences
    assert min(seen.values()) > 50


def test_a_capture_that_fails_leaves_nothing_in_the_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory after the commit: the rows that it queued are of no request."""
    engine, _ = captured(honest(), "chain", max_batch=1)
    packed, graph_of, queued = decode._packed, engine.steps.graph_for, list[list[int]]()

    def fail_once(*_: object) -> NoReturn:
        monkeypatch.setattr("d2sd.runtime.decode._packed", packed)
        raise RuntimeError("out of memory")

    def graph(*arguments: Any) -> Any:
        before = engine.runner.context.pending_rows.values()
        found = graph_of(*arguments)
        queued.append([a - b for a, b in zip(engine.runner.context.pending_rows.values(), before, strict=True)])
        return found

    monkeypatch.setattr("d2sd.runtime.decode._packed", fail_once)
    monkeypatch.setattr(engine.steps, "graph_for", graph)
    request = Request((5, 6, 7), 4, GREEDY)
    assert [s.answer for s in engine.generate([request])] == [expected(request)]
    assert engine.steps.refused
    assert queued[0] == [0, 0]


def test_a_refused_capture_is_told_once_or_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(run: Callable[[], object]) -> NoReturn:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(runner := honest(), "capture", refuse)
    request = Request((5, 6), 3, GREEDY)
    engine = make_engine(runner, "off", max_batch=1)
    assert [s.answer for s in engine.generate([request] * 2)] == [expected(request)] * 2
    told = "decode steps run without CUDA graphs: RuntimeError: operation not permitted"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [told]
    monkeypatch.setenv("D2SD_NO_FALLBACK", "1")
    with pytest.raises(D2SDError, match="cannot be captured"):
        make_engine(runner, "off", max_batch=1).generate([request])


@pytest.mark.parametrize("policy", ["off", pytest.param("lookup", marks=pytest.mark.slow)])
def test_after_a_warm_up_nothing_is_captured(policy: str) -> None:
    requests = [Request((5, 6, 5), 4, replace(kind, seed=9)) for kind in (HOT, NARROW, GREEDY)]
    engine, graphs = captured(honest(), policy, max_batch=2)
    for work in engine.steps.warm_ups([(engine.policy, 1), (engine.policy, 2)]):
        work()
    assert len(graphs.graphs) == 2 * 3
    assert [s.answer for s in engine.generate(requests)] == [expected(r) for r in requests]
    assert len(graphs.graphs) == 2 * 3
