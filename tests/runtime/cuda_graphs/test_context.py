"""What a captured step leaves to the drafters of the next: in its memory, or copied before that is overwritten."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import pytest
import torch
from torch import Tensor

from d2sd.modeling.drafter import Drafter
from d2sd.modeling.rows import CommittedRows
from d2sd.policies import PolicyName
from d2sd.runtime.backends.model_runner import ModelRunner
from d2sd.runtime.cuda_graphs.context import StaticContext
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Request, SamplingParams
from d2sd.runtime.speculation.policy import make_policy
from tests.runtime.helpers import BLOCK, BRANCHES, BUDGET, check_pages, copies, expected, make_engine
from tests.runtime.recorded_graphs import RecordedGraphs

WIDTH, PAGES = 3, 5


def committed(requests: int, length: int, start: int) -> CommittedRows:
    """Rows whose numbers count from `start`, all kept."""
    places = torch.arange(start, start + requests * length).view(requests, length)
    features = places[..., None].expand(-1, -1, WIDTH).float()
    table = torch.arange(start, start + requests * PAGES).view(requests, PAGES)
    return CommittedRows(features, table, places, torch.ones(requests, length, dtype=torch.bool), page_size=4)


def static(requests: int = 4) -> StaticContext:
    return StaticContext(requests, PAGES, BLOCK, WIDTH, 4, torch.float32, "cpu")


def test_rows_of_a_shallower_step_are_the_first() -> None:
    """The others are not kept, whatever was there before."""
    context = static()
    context.store(committed(2, BLOCK, 100))
    context.store(committed(2, 3, 7))
    rows, part = context.rows(2), context.part(2, 3)
    assert rows.keep.tolist() == [[True] * 3 + [False] * (BLOCK - 3)] * 2
    for found, given in zip(part.tensors, committed(2, 3, 7).tensors, strict=True):
        assert torch.equal(found, given)
    assert rows.positions.shape == (2, BLOCK)


def test_rows_keep_their_addresses() -> None:
    context = static()
    before = [tensor.data_ptr() for tensor in context.rows(3).tensors]
    context.store(committed(3, BLOCK, 1))
    context.clear()
    assert [tensor.data_ptr() for tensor in context.rows(3).tensors] == before
    assert not context.rows(3).keep.any()


def test_what_runs_before_a_capture_changes_nothing() -> None:
    context = static()
    context.store(committed(2, BLOCK, 9))
    with context.kept():
        assert not context.rows(4).keep.any()
        context.store(committed(4, BLOCK, 50))
    assert torch.equal(context.rows(2).positions, committed(2, BLOCK, 9).positions)
    assert context.rows(4).keep[:2].all()
    assert not context.rows(4).keep[2:].any()


class Watched(ModelRunner):
    """Notes whether each captured step took what the one before it left."""

    def __init__(self) -> None:
        super().__init__(*copies()[:3])
        self.taken: list[bool] = []

    def take_left(self, drafters: object, requests: int) -> bool:
        self.taken.append(super().take_left(drafters, requests))  # type: ignore[arg-type]
        return self.taken[-1]


def engine_of(policy: PolicyName, **settings: int) -> tuple[Engine, Watched]:
    runner = Watched()
    return RecordedGraphs(rerun=True).guard(make_engine(runner, policy, **settings)), runner  # type: ignore[arg-type]


def request(length: int, seed: int) -> Request:
    return Request((seed, 7, 9), length, SamplingParams(seed=seed))


@pytest.mark.parametrize("policy", ["chain", "d2sd"])
def test_a_step_takes_what_the_one_before_it_left(policy: PolicyName) -> None:
    """But the first. Its drafter makes the keys and values in the pass that drafts: nothing is queued."""
    engine, runner = engine_of(policy, max_batch=1)
    sequence = engine.submit(request(20, 1))
    while engine.busy:
        engine.step()
        assert all(pending.rows == 0 for which, pending in enumerate(runner._pending) if policy == "d2sd" or not which)
    assert sequence.answer == expected(sequence.request)
    assert runner.taken == [False] + [True] * (len(runner.taken) - 1)
    assert len(runner.taken) > 5


def test_another_batch_or_a_new_prompt_is_injected_first() -> None:
    """Two requests, of which one ends; then another's prompt: what was left is queued before."""
    engine, runner = engine_of("chain", max_batch=2)
    engine.submit(request(8, 2))
    long = engine.submit(request(40, 1))  # its rows are the second's in the memory
    while len(engine.scheduler.running) != 1 or engine.scheduler.waiting:
        engine.step()
    engine.step()
    engine.step()
    before = len(runner.taken)
    assert not all(runner.taken[1:]), "the first step of one request does not take what two left"
    assert runner.taken[-1]
    engine.submit(request(9, 3))
    engine.step()
    engine.step()
    assert not all(runner.taken[before:])
    check_pages(runner, torch.tensor(long.pages), long.tokens[: long.cached])
    while engine.busy:
        engine.step()
    assert long.answer == expected(long.request)


def test_what_a_policy_does_not_take_is_queued_once() -> None:
    """Policies in turns: a drafter that waits has every row of its requests in its queue, and its pages end right."""
    engine, runner = engine_of("off", max_batch=1)
    sequence = engine.submit(request(40, 5))
    names: tuple[PolicyName, ...] = "chain", "off", "d2sd", "chain"
    for step in range(16):
        engine.policy = make_policy(names[step % 4], block_size=BLOCK, branches=BRANCHES, row_budget=BUDGET)
        engine.step()
    engine.collect(engine._launched)
    check_pages(runner, torch.tensor(sequence.pages), sequence.tokens[: sequence.cached])


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Positions of the rows of every product for context, in their order."""
    found: list[tuple[int, ...]] = []
    compute = Drafter.context_keys_values

    def noted(self: Drafter, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        found.append(tuple(positions.flatten().tolist()))
        return compute(self, features, positions)

    monkeypatch.setattr(Drafter, "context_keys_values", noted)
    return found


def left(positions: SequenceOf[int], page: int) -> CommittedRows:
    places = torch.tensor([positions])
    features = torch.ones(1, len(positions), 32)
    return CommittedRows(features, torch.tensor([[page] * 4]), places, torch.ones_like(places, dtype=torch.bool), 4)


def runner_with_pages() -> ModelRunner:
    runner = ModelRunner(*copies()[:3])
    runner.allocate(8, 4)
    return runner


def test_rows_left_are_older_than_what_is_pushed_later(injected: list[tuple[int, ...]]) -> None:
    runner = runner_with_pages()
    pending, memory = runner._pending[0], left([1, 2], 1)
    pending.leave(memory)
    pending.flush()
    assert injected == []
    assert pending.behind
    pending.push(left([9], 2))
    memory.positions.fill_(99)  # the next step overwrites it
    pending.flush()
    assert injected == [(1, 2, 9)]
    assert not pending.behind


def test_rows_left_are_dropped_with_their_page(injected: list[tuple[int, ...]]) -> None:
    runner = runner_with_pages()
    pending = runner._pending[0]
    pending.leave(left([1, 2], 1))
    pending.drop([1])
    pending.push(left([3], 1))
    pending.flush()
    assert injected == [(3,)]


def test_a_draft_does_not_run_before_what_was_left() -> None:
    engine, runner = engine_of("chain", max_batch=1)
    engine.submit(request(20, 1))
    engine.step()
    engine.step()
    batch = engine.prepare(engine.scheduler.running)[0]
    with pytest.raises(AssertionError, match="sync_drafters"):
        runner.draft_first(batch, 1)


def test_a_step_without_a_graph_finds_what_was_left() -> None:
    """A request with a penalty joins one whose steps are captured. Nothing is prefilled: its prompt is its anchor."""
    engine, runner = engine_of("chain", max_batch=2)
    sequence = engine.submit(request(30, 1))
    for _ in range(4):
        engine.step()
    loud = engine.submit(Request((1,), 4, SamplingParams(repetition_penalty=1.5)))
    while loud.finish is None:
        engine.step()
    check_pages(runner, torch.tensor(sequence.pages), sequence.tokens[: sequence.cached])
    while engine.busy:
        engine.step()
    assert sequence.answer == expected(sequence.request)


def test_a_capture_that_fails_leaves_no_context_to_inject(capfd: pytest.CaptureFixture[str]) -> None:
    engine, runner = engine_of("chain", max_batch=1)

    def refused(run: object) -> None:
        assert runner._joined == {}
        runner.join(static().rows(1), (0, 1))
        raise RuntimeError("no graph")

    runner.capture = refused  # type: ignore[assignment]
    sequence = engine.submit(request(6, 1))
    while engine.busy:
        engine.step()
    assert "no graph" in capfd.readouterr().err
    assert runner._joined == {}
    assert sequence.answer == expected(sequence.request)
