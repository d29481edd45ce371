"""The switch in a request: who speculates, beside whom, and by which policy. No text depends on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from itertools import count
from typing import Any

import pytest

from d2sd.errors import RequestError
from d2sd.runtime.engine import Engine
from d2sd.runtime.policy_selector import PolicySelector
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.speculation.policy import Chain, DDTree, Hybrid, Off, Policy
from d2sd.runtime.step_times import RowTimes, StepTimes
from tests.runtime.cuda_graphs.test_steps import HOT, NARROW, knowing, some
from tests.runtime.helpers import (
    BLOCK,
    BRANCHES,
    GREEDY,
    cheater,
    expected,
    honest,
    make_engine,
    run_staggered,
    some_requests,
    switched,
)
from tests.runtime.recorded_graphs import RecordedGraphs
from tests.tiny import CASES

SWITCHES: tuple[Any, ...] = (True, False)


def mixed(requests: SequenceOf[Request] = ()) -> list[Request]:
    """Every second one does not speculate."""
    return [switched(request, SWITCHES[place % 2]) for place, request in enumerate(requests or some_requests())]


def check(sequences: list[Sequence]) -> None:
    """All answers are the oracle's; requests without speculation verify a row a step, and others more."""
    assert [s.answer for s in sequences] == [expected(s.request) for s in sequences]
    for one in sequences:
        if not one.speculates:
            assert one.stats.tokens == one.stats.steps == one.stats.verified_nodes
            assert set(one.stats.policies) == {"off"}
            assert not one.stats.accepted_branches
    others = [s.stats for s in sequences if s.speculates]
    assert sum(stats.verified_nodes for stats in others) > 2 * sum(stats.steps for stats in others)
    assert sum(stats.tokens for stats in others) > sum(stats.steps for stats in others)


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("off", "lookup")])
def test_requests_of_a_batch_speculate_or_do_not(case: str, lookup: bool) -> None:
    requests = mixed()
    flex = "flex" in case
    engine = make_engine(honest(case=case) if flex else cheater(requests), case, lookup=lookup)
    sequences = run_staggered(engine, requests, gap=1)
    assert [s.answer for s in sequences] == [expected(s.request) for s in sequences]
    if not flex:
        check(sequences)


@pytest.mark.usefixtures("layers_of_pytorch")
@pytest.mark.parametrize("rerun", [False, True])
def test_captured_steps_accept_one_row_of_those_that_do_not(rerun: bool) -> None:
    """One graph serves any mixture: what each may verify is an input of it."""
    requests, graphs = mixed(some(8, GREEDY, HOT, NARROW)), RecordedGraphs(rerun=rerun)
    engine = graphs.guard(make_engine(knowing(requests), "hybrid", max_batch=3))
    sequences = run_staggered(engine, requests, gap=1)
    assert graphs.replays
    check(sequences)


def test_where_nobody_speculates_no_drafter_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [switched(request, False) for request in some_requests()]
    runner = cheater(requests)
    monkeypatch.setattr(runner.drafts, "first", None)
    engine = make_engine(runner, "d2sd")
    sequences = run_staggered(engine, requests, gap=1)
    assert [s.answer for s in sequences] == [expected(r) for r in requests]
    assert engine.served == Off(1)


def policies_of(engine: Engine, requests: list[Request]) -> Counter[str]:
    """Steps by policy, of requests that begin together."""
    engine.record_trace, served = True, Counter[str]()
    for request in requests:
        engine.submit(request)
    while engine.busy:
        engine.step()
        served.update([engine.trace.policy.name] if engine.trace else [])
    return served


def test_a_policy_serves_steps_in_which_all_who_speculate_ask_for_it() -> None:
    requests = list(some_requests()[:3])
    engine = make_engine(cheater(tuple(requests)), "d2sd")
    engine.offer({"chain": Chain(BLOCK), "hybrid": Hybrid(14, BRANCHES)})

    def asking(*switches: Any) -> Counter[str]:
        return policies_of(engine, [switched(r, s) for r, s in zip(requests, switches, strict=True)])

    chain, hybrid = {"policy": "chain"}, {"policy": "hybrid"}
    assert set(asking(chain, chain, chain)) == {"chain"}
    assert set(asking(chain, False, {"policy": "off"})) == {"chain", "off"}
    assert "d2sd" in asking(chain, hybrid, False)
    assert "d2sd" in asking(chain, True, True)


def test_what_is_not_offered_is_refused_with_what_is() -> None:
    requests = some_requests()
    engine = make_engine(honest(), "d2sd")
    for name in ("hybrid", "no such"):
        with pytest.raises(RequestError) as refused:
            engine.submit(switched(requests[0], {"policy": name}))
        assert (refused.value.where, refused.value.expected) == ("speculative.policy", "off")
    engine.offer({"chain": Chain(BLOCK)})
    with pytest.raises(RequestError, match="expected: off, chain"):
        engine.submit(switched(requests[0], {"policy": "hybrid"}))
    for wrong in ("off", {}, {"policy": 1}, {"rows": 1}, 0):
        with pytest.raises(RequestError, match="speculative"):
            SamplingParams(speculative=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_auto_expects_nothing_of_requests_that_do_not_speculate(on_gpu: bool) -> None:
    """A tree that pays for one request does not pay for its neighbours, and their tokens teach it nothing."""
    policies: tuple[Policy, ...] = (Off(1), DDTree(8, lookup=True))
    costs = {(policy, size): 1.0 + 0.8 * place for place, policy in enumerate(policies) for size in (1, 2, 3, 4)}
    times = StepTimes.of(costs)
    forecast = {"ddtree": ([1.0, 2.0], [1.0, 2.0])}
    verify = None if on_gpu else RowTimes.of(times)
    requests = some_requests()[:4]
    engine = make_engine(cheater(requests, first_errors=0), "ddtree")
    for speculating in range(5):
        engine.selector = PolicySelector(policies, times, forecast, lambda: 0.0, BLOCK - 1, verify)
        sequences = [Sequence(n, switched(r, n < speculating), list(r.prompt)) for n, r in enumerate(requests)]
        choice = engine.selector.choose_for(sequences, {})
        assert choice.policy is policies[speculating > 2], speculating
        assert speculating <= 2 or choice.tokens == pytest.approx(1 + speculating / 4, abs=0.4)
        engine.selector.update(
            choice, [1] * 4, [not s.speculates for s in sequences], [s.acceptance for s in sequences]
        )
        assert [s.acceptance.steps for s in sequences] == [int(n < speculating > 2) for n in range(4)]


def test_under_auto_texts_and_rows_are_the_same() -> None:
    requests = mixed()
    engine = make_engine(cheater(requests), "off")
    policies: tuple[Policy, ...] = (Off(1), Chain(BLOCK), DDTree(8, lookup=True))
    engine.offer({policy.name: policy for policy in policies})
    costs = {(policy, size): 1.0 for policy in policies for size in (1, 2, 3, 4)}
    forecast = {name: ([1.0, 2.0], [1.0, 2.0]) for name in ("chain", "ddtree")}
    engine.selector = PolicySelector(
        policies, StepTimes.of(costs), forecast, slots=BLOCK - 1, verify=RowTimes.of(StepTimes.of(costs))
    )
    check(run_staggered(engine, requests, gap=1))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("speculating", [3, 4])
def test_a_step_without_the_rows_of_some_does_not_say_what_a_whole_one_takes(speculating: int, whole: bool) -> None:
    """A step takes 1.9 s where 2.2 s were guessed: on a CPU because a request verified one row."""
    off, chain = Off(1), Chain(BLOCK)
    times = StepTimes({(off, 4): 2.0, (chain, 4): 2.2}, {}, {}, frozenset({(chain, 4)}))
    requests = [switched(r, n < speculating) for n, r in enumerate(some_requests()[:4])]
    engine = make_engine(cheater(requests), "chain")
    engine.runner.static_shapes = whole
    clock = count(0.0, 1.9).__next__
    engine.selector = PolicySelector((off, chain), times, {"chain": ([4.0], [4.0])}, clock)
    sequences = [engine.submit(request) for request in requests]
    while not all(s.stats.steps for s in sequences):
        engine.step()
    assert engine.served == chain
    learned = whole or speculating == 4
    assert engine.selector.times.seconds[chain, 4] == pytest.approx(1.9 if learned else 2.2)


def test_a_gpu_serves_no_choice_that_was_not_measured() -> None:
    """A tree that `auto` left out at two requests, because it did not pay or fit, is served to one alone."""
    off, tree = Off(1), DDTree(8)
    times = StepTimes.of({(off, 1): 1.0, (off, 2): 1.0, (tree, 1): 9.0})
    for on_gpu, expected_of_two in ((False, tree), (True, off)):
        requests = [switched(request, {"policy": "ddtree"}) for request in some_requests()[:2]]
        engine = make_engine(cheater(requests), "ddtree", max_batch=2)
        engine.offer({"ddtree": tree})
        engine.selector = PolicySelector((off, tree), times, {"ddtree": ([1.0], [1.0])})
        if on_gpu:
            RecordedGraphs(rerun=True).guard(engine)
        sequences = [Sequence(n, request, list(request.prompt)) for n, request in enumerate(requests)]
        assert engine.prepare(sequences).policy == expected_of_two
        assert engine.prepare(sequences[:1]).policy == tree
        assert [one.answer for one in engine.generate(requests)] == [expected(request) for request in requests]


def test_what_may_be_served_is_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `auto` what was measured, else the engine's policy; what requests may choose, where choices are offered."""
    told: list[set[tuple[Policy, int]]] = []
    monkeypatch.setattr("d2sd.runtime.engine.warm_up", lambda _, __, ___, served, ____: told.append({*served}))
    engine, off, chain = make_engine(honest(), "chain", max_batch=2), Off(1), Chain(BLOCK)
    engine.warm_up()
    engine.offer({"chain": chain})
    engine.warm_up()
    costs: dict[tuple[Policy, int], float] = {(off, 1): 1.0, (off, 2): 1.0, (chain, 1): 1.0}
    engine.selector = PolicySelector((off, chain), StepTimes.of(costs), {"chain": ([1.0], [1.0])})
    engine.warm_up()
    own = {(chain, 1), (chain, 2)}
    assert told == [own, own | {(off, 1), (off, 2)}, {*costs}]
