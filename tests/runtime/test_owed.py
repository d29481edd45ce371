"""Drafters that did not run are fed later: their pages end as if they had been fed at every step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from d2sd.modeling.drafter import Drafter
from d2sd.runtime import executor as module
from d2sd.runtime.engine import Engine
from d2sd.runtime.executor import TorchExecutor
from d2sd.runtime.policy import Chain, Policy, PolicyName
from d2sd.runtime.request import Request, SamplingParams
from tests.runtime.helpers import BLOCK, check_pages, copies, expected, make_engine, settle, some_requests


class Eager(TorchExecutor):
    """Pays at once."""

    def _append(self, *arguments: Tensor) -> None:
        super()._append(*arguments)
        settle(self)


def owed(executor: TorchExecutor) -> list[int]:
    """Rows owed to each drafter."""
    return [sum(one.positions.numel() for one in debts) for debts in executor._owed]


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is paid before a drafter asks for it."""
    monkeypatch.setattr(module, "_MOST_OWED", 10**9)


def run(executor: TorchExecutor, policy: PolicyName, *, pages: int | None = None) -> tuple[Engine, dict[int, set[int]]]:
    """All requests, one joining every second step; also which requests had each page."""
    engine = make_engine(executor, policy, pages=pages)
    requests, owners = list(some_requests()[:6]), dict[int, set[int]]()
    sequences = []
    step = 0
    while requests or engine.busy:
        if requests and step % 2 == 0:
            sequences.append(engine.submit(requests.pop(0)))
        engine.step()
        step += 1
        for sequence in engine._scheduler.running:
            for page in sequence.pages:
                owners.setdefault(page, set()).add(sequence.id)
    assert [s.answer for s in sequences] == [expected(s.request) for s in sequences]
    return engine, owners


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize("pages", [None, 11])
@pytest.mark.parametrize("policy", ["off", "chain", "reanchor"])
def test_pages_end_as_if_they_had_been_paid_at_every_step(policy: PolicyName, pages: int | None) -> None:
    """Every page, those of requests that left too: the last who had a page wrote last. With 11 pages some preempt."""
    lazy, eager = TorchExecutor(*copies()), Eager(*copies())
    engine, owners = run(lazy, policy, pages=pages)
    run(eager, policy, pages=pages)
    rows = owed(lazy)
    assert owed(eager) == [0, 0]
    assert (rows[0] > 100) == (policy == "off")
    assert rows[1] > 100
    assert sum(len(ids) > 1 for ids in owners.values()) > 2, "pages must be handed on, or this shows nothing"
    assert not engine.busy
    stale = [pool.k.clone() for pool in lazy._pools]
    settle(lazy)
    assert owed(lazy) == [0, 0]
    assert not torch.equal(stale[1][:, 1:], lazy._pools[1].k[:, 1:])
    for one, other in zip(lazy._pools, eager._pools, strict=True):
        torch.testing.assert_close(one.k[:, 1:], other.k[:, 1:], atol=1e-5, rtol=0)
        torch.testing.assert_close(one.v[:, 1:], other.v[:, 1:], atol=1e-5, rtol=0)


@pytest.mark.usefixtures("never")
def test_a_page_holds_what_its_last_owner_wrote() -> None:
    """Two requests one after the other on the same pages, nothing paid between: all pools hold the second's tokens."""
    executor = TorchExecutor(*copies())
    engine = make_engine(executor, "off", max_batch=1, pages=8)
    engine.generate([Request(tuple(range(9)), 14, SamplingParams(seed=1))])
    second = engine.submit(Request(tuple(range(40, 47)), 12, SamplingParams(seed=2)))
    for _ in range(8):
        engine.step()
    table = torch.tensor(second.pages)
    assert owed(executor)[0] >= 9 - 1 + 14 + 7 - 1 + 8
    check_pages(executor, table, second.tokens[: second.cached])


@pytest.mark.usefixtures("never")
def test_a_drafter_finds_everything_when_its_turn_comes() -> None:
    """Twenty plain steps, then a chain: it drafts what it would have drafted had it been fed all along."""
    drafts = []
    for kind in (TorchExecutor, Eager):
        executor = kind(*copies())
        engine = make_engine(executor, "off")
        for request in some_requests()[:3]:
            engine.submit(Request(request.prompt, 30, request.sampling))
        for _ in range(20):
            engine.step()
        policy: Policy = Chain(BLOCK)
        engine.policy = policy
        engine.step()
        assert engine.trace is not None
        assert engine.trace.first is not None
        drafts.append(engine.trace.first)
        # The step's own rows are new debts: they were committed after the draft.
        assert owed(executor) == ([0, 0] if kind is Eager else [4 * BLOCK, owed(executor)[1]])
    assert torch.equal(drafts[0].tokens[:3], drafts[1].tokens[:3])
    torch.testing.assert_close(drafts[0].logprob[:3], drafts[1].logprob[:3], atol=1e-4, rtol=0)


def test_debts_stay_small_and_weights_are_read_once_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain steps of one request pay every 64th: memory does not grow, and a drafter's weights are read that seldom."""
    executor = TorchExecutor(*copies())
    engine = make_engine(executor, "off", max_batch=1)
    seen: list[int] = []
    compute = Drafter.context_keys_values

    def counted(self: Drafter, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(positions.numel())
        return compute(self, features, positions)

    monkeypatch.setattr(Drafter, "context_keys_values", counted)
    for n in range(4):
        engine.submit(Request((n,), 40, SamplingParams(seed=n)))
    while engine.busy:
        engine.step()
        assert max(owed(executor)) <= 64
    assert seen == [64, 64] * 2  # 160 rows, each drafter twice
    settle(executor)
    assert sum(seen) == 2 * 160
    settle(executor)
    assert len(seen) == 6, "nothing owed, nothing read"


def test_new_pools_owe_nothing() -> None:
    executor = TorchExecutor(*copies())
    make_engine(executor, "off").generate(some_requests()[:1])
    assert max(owed(executor)) > 0
    make_engine(executor, "off")
    assert owed(executor) == [0, 0]


def test_without_drafters_nothing_is_owed() -> None:
    executor = TorchExecutor(copies()[0], block_size=BLOCK)
    make_engine(executor, "off").generate(some_requests()[:1])
    assert owed(executor) == []
