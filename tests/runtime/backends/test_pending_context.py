"""Drafters that did not run are fed later: their pages end as if they had been fed at every step."""

from __future__ import annotations

import pytest
import torch

from d2sd.policies import DrafterRole
from d2sd.runtime.drafting import context as module
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.policy import Chain
from tests.runtime.helpers import BLOCK, check_pages, copies, expected, make_engine, some_requests, sync_drafters
from tests.tiny import runner_of


def owed(runner: ModelRunner) -> list[int]:
    """Rows owed to each drafter, without padding and what was dropped. The queues stay as they are."""
    kept = [debts.kept(debts._entries) for debts in runner.context._queues.values()]
    return [sum(len(entry.positions) for _, entry in entries) for entries in kept]


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is paid before a drafter asks for it."""
    monkeypatch.setattr(module, "MAX_PENDING_ROWS", 10**9)


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_page_holds_what_its_last_owner_wrote(prefix_cache: bool) -> None:
    """Two requests one after the other on the same pages, nothing paid between: all pools hold the second's tokens."""
    runner = runner_of(*copies()[:3])
    engine = make_engine(runner, "off", max_batch=1, pages=8, prefix_cache=prefix_cache)
    engine.generate([Request(tuple(range(9)), 14, SamplingParams(seed=1))])
    second = engine.submit(Request(tuple(range(40, 47)), 12, SamplingParams(seed=2)))
    for _ in range(8):
        engine.step()
    table = torch.tensor(second.pages)
    if prefix_cache:
        assert engine.stats.pages_cached == 3 < (9 - 1 + 14) // 4, "pages must be evicted, or this shows nothing"
        assert owed(runner)[0] == 3 * 4 + 7 - 1 + 8, "the second's rows, and the first's of pages that are still cached"
    else:
        assert owed(runner)[0] == 7 - 1 + 8, "the second's rows, not the first's"
    check_pages(runner, table, second.tokens[: second.cached])


def test_debts_stay_small_and_are_paid_in_parts(
    monkeypatch: pytest.MonkeyPatch, injected: list[tuple[int, ...]]
) -> None:
    """Up to 16 rows of a long answer wait, and 4 are written at a time, so that no step takes long."""
    monkeypatch.setattr(module, "MAX_PENDING_ROWS", 16)
    monkeypatch.setattr(module, "_PARTS", 4)
    runner = runner_of(*copies()[:3])
    engine = make_engine(runner, "off", max_batch=1, prefix_cache=False)
    for length in (12, 40, 12):
        engine.generate([Request((1,), length, SamplingParams(seed=length))])
        assert engine.step() == []
        assert owed(runner) == [0, 0]
    assert [*map(len, injected)] == [4] * 7 * 2


def test_rows_of_requests_that_do_not_draft_wait(injected: list[tuple[int, ...]]) -> None:
    """One of two is drafted for: its rows alone are computed, and those of the other when its turn comes, if any."""
    runner = runner_of(*copies()[:3])
    engine = make_engine(runner, "off", max_batch=2, prefix_cache=False)
    first, second = (engine.submit(Request((seed, 3, 5), 12, SamplingParams(seed=seed))) for seed in (1, 2))
    for _ in range(4):
        engine.step()
    engine.policy, sequences = Chain(BLOCK), engine.admit()
    assert runner.context.pending_of(sequences) == dict.fromkeys(runner.drafters, first.cached + second.cached)
    engine.collect(engine.launch(engine.prepare([second]), None, None))
    (rows,) = injected
    drafted = len(rows)
    assert drafted == second.injected[DrafterRole.FIRST] < second.cached
    committed = second.cached - drafted
    assert runner.context.pending_of([second])[DrafterRole.FIRST] == committed
    assert owed(runner) == [first.cached + committed, first.cached + second.cached]
    engine.cancel(first)
    while engine.busy:
        engine.step()
    assert max(map(len, injected[1:])) <= BLOCK, "the first's were not computed with those of a step"


def test_a_request_that_is_preempted_owes_its_context_again() -> None:
    runner = runner_of(*copies()[:3])
    engine = make_engine(runner, "chain", max_batch=1)
    sequence = engine.submit(Request((1, 3, 5), 20, SamplingParams(seed=1)))
    for _ in range(3):
        engine.step()
    assert 0 < sequence.injected[DrafterRole.FIRST] <= sequence.cached
    engine.scheduler._preempt(sequence)
    assert sequence.injected == {}
    assert runner.context.pending_of([sequence])[DrafterRole.FIRST] == 0, "nothing of it is committed"
    while engine.busy:
        engine.step()
    assert sequence.answer == expected(sequence.request)


def test_many_rows_that_wait_become_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ENTRIES", 2)
    runner = runner_of(*copies()[:3])
    engine = make_engine(runner, "off", max_batch=2, prefix_cache=False)
    first, second = (engine.submit(Request((seed, 3, 5), 30, SamplingParams(seed=seed))) for seed in (1, 2))
    for _ in range(6):
        engine.step()
    engine.policy = Chain(BLOCK)
    engine.admit()
    engine.collect(engine.launch(engine.prepare([second]), None, None))
    (queue, _) = runner.context._queues.values()
    assert len(queue._entries) == 2, "the first request's rows, and those of the step"
    while engine.busy:
        engine.step()
    for sequence in (first, second):
        assert sequence.answer == expected(sequence.request)


def test_padding_and_rejected_rows_are_not_computed(injected: list[tuple[int, ...]]) -> None:
    """Three requests in a bucket of four, blocks of which little is accepted: every token is computed once."""
    runner = runner_of(*copies()[:3])
    engine = make_engine(runner, "chain")
    running = [engine.submit(Request(r.prompt, 30, r.sampling)) for r in some_requests()[:3]]
    for _ in range(6):
        engine.step()
    sync_drafters(runner)
    assert sum(map(len, injected)) == 2 * sum(sequence.cached for sequence in running)


def test_without_drafters_nothing_is_owed() -> None:
    runner = runner_of(copies()[0], block_size=BLOCK)
    make_engine(runner, "off").generate(some_requests()[:1])
    assert owed(runner) == []
