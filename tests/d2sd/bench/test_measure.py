"""One cell against a recount of its steps, on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from d2sd.bench import metrics
from d2sd.bench.measure import measure_cell
from d2sd.bench.result import Cell, Key
from d2sd.build.validate.near_ties import TIE_TOLERANCE
from d2sd.policies import PolicyName
from d2sd.runtime.decode import StepTrace
from d2sd.runtime.engine import Engine
from d2sd.runtime.observe import StepObservation, observe
from d2sd.runtime.policy_selector import PolicySelector
from d2sd.runtime.request import Request
from d2sd.runtime.sequence import Output
from d2sd.runtime.sequence import Sequence as Running
from d2sd.runtime.speculation.policy import make_policy
from d2sd.runtime.step_times import StepTimes
from tests.runtime.helpers import BLOCK, BRANCHES, BUDGET, cheater, expected, honest, make_engine, some_requests
from tests.runtime.recorded_graphs import RecordedGraphs

NAMED = [(f"p{n}", request) for n, request in enumerate(some_requests()[:4])]
REQUESTS = [request for _, request in NAMED]
PLAIN = [expected(request) for request in REQUESTS]


def no_gap(request: Request) -> float:
    raise AssertionError("no answer differs")


def key_of(method: str, concurrency: int = 2) -> Key:
    return Key(method, 1 if method == "off" else BUDGET, "tiny", 0.0, concurrency)


def engine_of(policy: PolicyName, concurrency: int = 2) -> Engine:
    return make_engine(cheater(some_requests()[:4]), policy, max_batch=concurrency)


def measured(
    policy: PolicyName,
    concurrency: int = 2,
    *,
    plain: list[list[int]] | None = PLAIN,
    gap: Callable[[Request], float] = no_gap,
) -> Cell:
    return measure_cell(engine_of(policy, concurrency), key_of(policy, concurrency), NAMED, plain, gap)[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("policy", ["off", "chain", "d2sd", "hybrid", "lookup"])
def test_counts_add_up(policy: PolicyName, concurrency: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a recount from the traces of all steps behind the warm-up."""
    engine = engine_of(policy, concurrency)
    traces: list[tuple[StepTrace, list[tuple[int, int]]]] = []
    finished: list[int] = []
    cleared: list[int] = []
    step, clear = engine.step, type(engine.clock).clear

    def watched() -> list[Output]:
        outputs = step()
        if outputs and engine.trace is not None and cleared:
            traces.append((engine.trace, [(o.sequence.id, len(o.tokens)) for o in outputs]))
        return outputs

    def clearing(self: Any) -> None:
        cleared.append(self.steps)
        clear(self)

    monkeypatch.setattr(engine, "step", watched)
    monkeypatch.setattr(type(engine.clock), "clear", clearing)
    cell, answers = measure_cell(engine, key_of(policy, concurrency), NAMED, PLAIN, no_gap, finished.append)

    (warm_up,) = cleared
    assert warm_up >= 1
    assert answers == PLAIN
    assert cell.key == key_of(policy, concurrency)
    assert cell.steps == len(traces) == engine.clock.steps
    assert sum(finished) == 4
    assert [one.id for one in cell.requests] == ["p0", "p1", "p2", "p3"]
    assert [one.tokens for one in cell.requests] == [r.max_new_tokens for r in REQUESTS]
    accepted: dict[int, list[int]] = {}
    for trace, _ in traces:
        for row, sequence in enumerate(trace.sequences):
            accepted.setdefault(sequence.id, []).append(int(trace.accepted.count[row]))
    assert [one.accepted for one in cell.requests] == [accepted[n] for n in sorted(accepted)]
    committed = {s.id: s.stats.tokens for trace, _ in traces for s in trace.sequences}
    assert [sum(one.accepted) for one in cell.requests] == [committed[n] for n in sorted(committed)]
    for one in cell.requests:  # what is committed past the end is less than a block
        assert one.tokens <= sum(one.accepted) < one.tokens + BLOCK

    steps = metrics.request_steps(cell)
    assert cell.policies == {str(engine.policy): steps}
    assert cell.verified_rows == steps * engine.policy.num_nodes
    assert cell.nodes == sum(int(t.tree.valid[row].sum()) for t, _ in traces for row in range(len(t.sequences)))
    assert cell.merged == sum(int(t.tree.num_merged[row]) for t, _ in traces for row in range(len(t.sequences)))
    assert (sum(cell.boundary_rank.values()) == steps) == (policy in ("d2sd", "hybrid"))
    assert set(cell.boundary_rank) <= {"none", *map(str, range(BRANCHES))}
    if policy != "lookup":  # where nobody drafts, what was looked up may count or not
        named = {"off": set(), "chain": {"first"}}.get(policy, {"first", "second"})
        assert cell.calibration.keys() == named
    hits = sum(bin_[2] for bins in cell.calibration.values() for bin_ in bins)
    assert hits == metrics.committed(cell) - steps  # every draft that was accepted was judged, and right
    for count, said, right in (bin_ for bins in cell.calibration.values() for bin_ in bins):
        assert 0 <= right <= count
        assert 0 <= said <= count
    assert set(cell.stage_seconds) >= {"prefill", "verify", "accept", "commit", "retire"}
    assert cell.stage_seconds == engine.clock.seconds
    assert sum(cell.stage_seconds.values()) <= cell.wall_seconds
    assert cell.differences == []


def test_bins_hold_what_was_said() -> None:
    """The tenth bin's drafts were said to be 0.9 or more sure, and so on down."""
    cell = measured("hybrid")
    for bins in cell.calibration.values():
        assert len(bins) == 10
        for place, (count, said, _) in enumerate(bins):
            assert count * place / 10 - 1e-6 <= said <= count * (place + 1) / 10 + 1e-6
    assert sum(count > 0 for count, _, _ in cell.calibration["first"]) > 3


def test_the_first_cell_is_compared_with_nothing() -> None:
    assert measured("off", plain=None).differences == []


@pytest.mark.parametrize(("gap", "excused"), [(TIE_TOLERANCE / 2, True), (TIE_TOLERANCE * 2, False)])
def test_differences_are_reported_with_their_gap(gap: float, excused: bool) -> None:
    """Plain answers changed on purpose: in one a token, another cut short; the gap is asked for behind what agrees."""
    changed = [list(answer) for answer in PLAIN]
    changed[1][3] = (changed[1][3] + 1) % 64
    changed[1][5] = 0
    del changed[3][6:]
    asked: list[Request] = []

    def told(request: Request) -> float:
        asked.append(request)
        return gap

    cell = measured("hybrid", plain=changed, gap=told)
    assert [(d.request, d.token, d.gap, d.excused) for d in cell.differences] == [
        (1, 3, gap, excused),
        (3, 6, gap, excused),
    ]
    assert [r.prompt for r in asked] == [(*REQUESTS[1].prompt, *PLAIN[1][:3]), (*REQUESTS[3].prompt, *PLAIN[3][:6])]
    assert [r.sampling for r in asked] == [REQUESTS[1].sampling, REQUESTS[3].sampling]


def test_what_speculation_gains_does_not_depend_on_concurrency() -> None:
    accepted = [[one.accepted for one in measured("hybrid", concurrency).requests] for concurrency in (1, 3)]
    assert accepted[0] == accepted[1]


def test_watching_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a step moves by one second and everything else by a thousand."""
    engine = engine_of("chain", 1)
    now = [0.0]
    step = engine.step

    def ticking() -> list[Output]:
        now[0] += 1.0
        return step()

    def slow(trace: StepTrace) -> list[StepObservation]:
        now[0] += 1000.0
        return observe(trace)

    monkeypatch.setattr(engine, "step", ticking)
    monkeypatch.setattr("d2sd.bench.measure.observe", slow)
    monkeypatch.setattr("d2sd.bench.measure.time", SimpleNamespace(perf_counter=lambda: now[0]))
    cell, _ = measure_cell(engine, key_of("chain", 1), NAMED, PLAIN, no_gap)
    assert cell.steps <= cell.wall_seconds < 1000  # steps that only read a prompt are among them


@pytest.mark.parametrize(("concurrency", "length"), [(1, 3), (2, 12)])
def test_the_warm_up_is_short(concurrency: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tokens, or fewer if the answers are shorter; two requests where any run together. A salt of its own keeps
    its prompt from being a prefix hit when it is measured.
    """
    engine = engine_of("chain", concurrency)
    seen: list[list[Request]] = []
    generate = engine.generate

    def spying(requests: Any) -> Any:
        seen.append(list(requests))
        return generate(seen[-1])

    monkeypatch.setattr(engine, "generate", spying)
    requests = [(name, replace(request, max_new_tokens=length)) for name, request in NAMED]
    measure_cell(engine, key_of("chain", concurrency), requests, None, no_gap)
    assert seen == [[replace(REQUESTS[0], max_new_tokens=min(8, length), cache_salt="warm-up")] * concurrency]


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose steps are graphs, which a trace keeps from being launched ahead."""
    monkeypatch.setattr("d2sd.plugins.cpu.library.available", lambda: False)  # as on a GPU: operators, one by one
    engine = RecordedGraphs(rerun=True).guard(make_engine(honest(), "chain", max_batch=2))
    del engine.step  # which overwrites a step's memory, and its trace
    return engine


def test_what_is_timed_runs_ahead_as_it_is_served(ahead: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a step moves by one second if it is read before the next one is launched. What is counted is what a
    run without graphs counts.
    """
    plain = measure_cell(make_engine(honest(), "chain", max_batch=2), key_of("chain"), NAMED[:2], PLAIN[:2], no_gap)[0]
    now, step = [0.0], ahead.step

    def ticking() -> list[Output]:
        outputs = step()
        now[0] += 1.0 if outputs and ahead._launched is None else 0.001
        return outputs

    monkeypatch.setattr(ahead, "step", ticking)
    monkeypatch.setattr("d2sd.bench.measure.time", SimpleNamespace(perf_counter=lambda: now[0]))
    finished: list[int] = []
    cell, answers = measure_cell(ahead, key_of("chain"), NAMED[:2], PLAIN[:2], no_gap, finished.append)
    assert answers == PLAIN[:2]
    assert cell.differences == []
    assert sum(finished) == len(NAMED[:2]), "no answer twice"
    assert cell.wall_seconds < 2, "no step is launched behind the last"
    assert cell.steps > 12
    assert cell.stage_seconds["retire"] > 0
    assert plain.traced_steps == 0
    assert cell.traced_steps == metrics.request_steps(cell)
    for one, other in zip(cell.calibration["first"], plain.calibration["first"], strict=True):
        assert one == pytest.approx(other, rel=1e-5)  # sums of probabilities, which other shapes may round otherwise
    times: dict[str, Any] = {"wall_seconds": 1.0, "stage_seconds": {}, "steps": 1, "traced_steps": 0, "calibration": {}}
    assert cell.model_copy(update=times) == plain.model_copy(update=times)


def test_an_answer_that_a_trace_changes_is_a_difference(ahead: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = ahead.submit

    def changed(request: Request) -> Running:
        return submit(replace(request, prompt=request.prompt[::-1]) if ahead.record_trace else request)

    monkeypatch.setattr(ahead, "submit", changed)
    cell, answers = measure_cell(ahead, key_of("chain"), NAMED[:2], PLAIN[:2], lambda request: 1.0)
    assert answers == PLAIN[:2]
    assert cell.differences
    assert not any(difference.excused for difference in cell.differences)


def test_a_traced_run_begins_like_the_timed_one(ahead: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No prefix hits of its own, and nothing that `auto` has learned."""
    policies = [make_policy(name, block_size=BLOCK, branches=BRANCHES, row_budget=BUDGET) for name in ("off", "chain")]
    times = StepTimes.of({(policy, size): 1.0 for policy in policies for size in (1, 2)})
    ahead.selector = PolicySelector(policies, times, {"chain": ([1.0, 2.0], [1.0, 2.0])})
    begun: dict[bool, tuple[PolicySelector, int]] = {}  # by whether it is traced
    submit = ahead.submit

    def watched(request: Request) -> Running:
        assert ahead.selector is not None
        if request.cache_salt != "warm-up" and ahead.record_trace not in begun:
            begun[ahead.record_trace] = ahead.selector, ahead.stats.prefix_hit_tokens
            assert ahead.selector == ahead.selector.fresh()
        return submit(request)

    monkeypatch.setattr(ahead, "submit", watched)
    measure_cell(ahead, key_of("auto"), NAMED[:2], PLAIN[:2], no_gap)
    assert begun[False][0] is not begun[True][0]
    assert all(selector != selector.fresh() for selector, _ in begun.values()), "they learn"
    assert len({hits for _, hits in begun.values()} | {ahead.stats.prefix_hit_tokens}) == 1


def test_stop_tokens_end_an_answer_that_is_counted_as_it_is() -> None:
    """Tokens committed behind the stop are steps' gains, but no part of the answer."""
    stop = PLAIN[0][4]
    end = PLAIN[0].index(stop) + 1
    request = replace(REQUESTS[0], stop_tokens=frozenset({stop}))
    engine = make_engine(cheater([REQUESTS[0]], first_errors=0.0), "chain", max_batch=1)
    cell, answers = measure_cell(engine, key_of("chain", 1), [("a", request)], [PLAIN[0][:end]], no_gap)
    assert answers == [PLAIN[0][:end]]
    (one,) = cell.requests
    assert one.tokens == end
    assert set(one.accepted) == {BLOCK}
    assert cell.policies == {str(engine.policy): len(one.accepted)}
