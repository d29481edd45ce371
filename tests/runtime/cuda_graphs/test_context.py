"""A captured step leaves rows to the drafters of the next: in its memory, or copied before that is overwritten."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.kv_pool import CommittedRows, KVPool, PoolSizes
from d2sd.policies import DrafterRole, PolicyName
from d2sd.runtime.drafting.context import DrafterContext
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.policy import make_policy
from tests.runtime.helpers import BLOCK, BRANCHES, BUDGET, check_pages, copies, expected, make_engine
from tests.runtime.recorded_graphs import RecordedGraphs
from tests.tiny import prepared, runner_of, tiny_decoder, tiny_drafter

WIDTH, PAGES = 3, 5
FIRST, SECOND, *_ = DrafterRole


def committed(requests: int, length: int, start: int) -> CommittedRows:
    """Rows whose numbers count from `start`, all kept."""
    places = torch.arange(start, start + requests * length).view(requests, length)
    features = places[..., None].expand(-1, -1, WIDTH).float()
    table = torch.arange(start, start + requests * PAGES).view(requests, PAGES)
    return CommittedRows(features, (table,), places, torch.ones(requests, length, dtype=torch.bool), 4)


def static() -> DrafterContext:
    """The context of one drafter with features of this width; its memory is reserved."""
    body = replace(tiny_decoder().config.body, hidden_size=WIDTH, num_layers=1)
    config = replace(tiny_drafter(tiny_decoder().config, block_size=BLOCK).config, body=body, target_layer_ids=(0,))
    drafter = cast(Drafter, SimpleNamespace(config=config))
    context = DrafterContext(
        {FIRST: drafter}, {FIRST: KVPool(body, PoolSizes(8, 4), torch.float32, "cpu")}, torch.float32
    )
    context.reserve(4, PAGES, BLOCK)
    return context


def store(context: DrafterContext, rows: CommittedRows) -> None:
    """Commit these rows as a captured step does."""
    context.begin(len(rows.keep), ())
    context.add(rows)
    context.end()


def found_by(context: DrafterContext, requests: int) -> CommittedRows:
    """The rows that a captured step over so many requests injects."""
    context.begin(requests, (FIRST,))
    rows = context.take(FIRST)
    assert context.take(FIRST) is None, "in its first pass only"
    context.end()
    assert rows is not None
    return rows


def test_rows_of_a_shallower_step_are_the_first() -> None:
    """The others are not kept, whatever was there before."""
    context = static()
    store(context, committed(2, BLOCK, 100))
    store(context, committed(2, 3, 7))
    rows = found_by(context, 2)
    assert rows.keep.tolist() == [[True] * 3 + [False] * (BLOCK - 3)] * 2
    wanted = committed(2, 3, 7)
    assert torch.equal(rows.tables[0], wanted.tables[0])
    assert torch.equal(rows.features[:, :3], wanted.features)
    assert torch.equal(rows.positions[:, :3], wanted.positions)
    assert rows.positions.shape == (2, BLOCK)


def test_rows_keep_their_addresses_and_are_kept_once() -> None:
    """A replay over another batch finds none."""
    context = static()
    before = [tensor.data_ptr() for tensor in found_by(context, 3).tensors]
    store(context, committed(3, BLOCK, 1))
    with context.replay(3, BLOCK, (FIRST,)):
        pass
    assert [tensor.data_ptr() for tensor in found_by(context, 3).tensors] == before
    assert not found_by(context, 3).keep.any()


def test_what_runs_before_a_capture_changes_nothing() -> None:
    context = static()
    store(context, committed(2, BLOCK, 9))
    with context.preserved():
        assert not found_by(context, 4).keep.any()
        store(context, committed(4, BLOCK, 50))
    assert torch.equal(found_by(context, 2).positions, committed(2, BLOCK, 9).positions)
    assert found_by(context, 4).keep[:2].all()
    assert not found_by(context, 4).keep[2:].any()


class Watched(ModelRunner):
    """Notes whether each captured step took what the one before it left."""

    def __init__(self) -> None:
        super().__init__(*prepared(*copies()[:3]))
        self.taken: list[bool] = []

    def allocate(self, sizes: PoolSizes) -> None:
        super().allocate(sizes)
        replay = self.context.replay

        @contextmanager
        def noted(requests: int, length: int, drafters: Collection[DrafterRole]) -> Iterator[None]:
            left = self.context._left
            with replay(requests, length, drafters):
                self.taken.append(left is not None and bool(self.context.memory[2].any()))
                yield

        self.context.replay = noted  # type: ignore[method-assign]


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
        assert not any(runner.context.pending_rows[role] for role in engine.policy.drafters)
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


def left(positions: SequenceOf[int], page: int) -> CommittedRows:
    places = torch.tensor([positions])
    features = torch.ones(1, len(positions), 32)
    return CommittedRows(features, (torch.tensor([[page] * 4]),), places, torch.ones_like(places, dtype=torch.bool), 4)


def runner_with_pages() -> ModelRunner:
    runner = runner_of(*copies()[:3])
    runner.allocate(PoolSizes(8, 4))
    return runner


def leave(context: DrafterContext, rows: CommittedRows) -> None:
    """Replay a graph that commits these rows."""
    with context.replay(len(rows.keep), rows.keep.shape[1], ()):
        store(context, rows)


def test_rows_left_are_older_than_what_is_added_later(injected: list[tuple[int, ...]]) -> None:
    """Rows left are copied: the next step overwrites their memory."""
    context = runner_with_pages().context
    context.reserve(1, 4, BLOCK)
    leave(context, left([1, 2], 1))
    assert context.pending_rows == {FIRST: 0, SECOND: 0}
    context.add(left([9], 2))
    context.memory[1].fill_(99)
    context.inject((FIRST,))
    assert injected == [(1, 2, 9)]
    assert context.pending_rows == {FIRST: 0, SECOND: 3}, "the second drafter did not run"


def test_a_graph_takes_the_rows_left_for_its_drafters_alone(injected: list[tuple[int, ...]]) -> None:
    """Rows that were queued before them are injected first; the other drafter has both in its queue."""
    context = runner_with_pages().context
    context.reserve(1, 4, BLOCK)
    context.add(left([1], 1))
    leave(context, left([2, 3], 1))
    with context.replay(1, 2, (FIRST,)):
        assert injected == [(1,)]
        assert context.memory[2][:, :2].all()
    assert context.pending_rows == {FIRST: 0, SECOND: 3}


def test_a_graph_over_another_batch_finds_no_rows(injected: list[tuple[int, ...]]) -> None:
    context = runner_with_pages().context
    context.reserve(2, 4, BLOCK)
    leave(context, left([1, 2], 1))
    with context.replay(2, 2, (FIRST, SECOND)):
        assert injected == [(1, 2)] * 2
        assert not context.memory[2].any()


def test_rows_left_are_dropped_with_their_page(injected: list[tuple[int, ...]]) -> None:
    context = runner_with_pages().context
    context.reserve(1, 4, BLOCK)
    leave(context, left([1, 2], 1))
    context.drop([1])
    context.add(left([3], 1))
    context.inject((FIRST,))
    assert injected == [(3,)]


def test_a_draft_does_not_run_before_what_was_left() -> None:
    engine, runner = engine_of("chain", max_batch=1)
    engine.submit(request(20, 1))
    engine.step()
    engine.step()
    batch = engine.prepare(engine.scheduler.running).batch
    with pytest.raises(AssertionError, match="inject"):
        runner.drafts.first(batch, 1)


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


def test_a_capture_that_fails_leaves_no_context_to_inject(caplog: pytest.LogCaptureFixture) -> None:
    engine, runner = engine_of("chain", max_batch=1)

    def refused(run: object) -> None:
        runner.context.begin(1, (FIRST, SECOND))
        raise RuntimeError("no graph")

    runner.capture = refused  # type: ignore[assignment]
    sequence = engine.submit(request(6, 1))
    while engine.busy:
        engine.step()
    assert "no graph" in caplog.text
    assert runner.context._to_inject is None
    assert sequence.answer == expected(sequence.request)
