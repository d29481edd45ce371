"""Trees are chosen from costs and forecasts made by hand, measured on a scripted clock, and served by an engine whose
answers stay the same while its policy changes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from d2sd.errors import RequestError
from d2sd.modeling.joining import Joining
from d2sd.modeling.where import Where
from d2sd.plugins.trees import Accepted, Branches, Draft, Tree
from d2sd.policies import DrafterRole
from d2sd.runtime.acceptance import Acceptance, Gains, RequestAcceptance
from d2sd.runtime.batch import Batch
from d2sd.runtime.cuda_graphs.steps import DecodeSteps
from d2sd.runtime.drafting.passes import Block
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner, Verified
from d2sd.runtime.policy_selector import MARGIN, Asked, PolicySelector, _before_the_end, forecast_gain, forecast_tau
from d2sd.runtime.request import Limits, Request, bucket, buckets
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.served_times import Choice, StepKind
from d2sd.runtime.speculation.policy import Chain, DDTree, Hybrid, Lookup, Off, Policy
from d2sd.runtime.step_times import LIMIT, RowTimes, StepTimer, StepTimes, measure_step_times, time_context, time_steps
from tests.runtime.helpers import (
    BLOCK,
    BRANCHES,
    cheater,
    expected,
    honest,
    make_engine,
    run_staggered,
    some_requests,
    switched,
)
from tests.runtime.recorded_graphs import RecordedGraphs

FIRST, SECOND, *_ = DrafterRole

OFF, CHAIN, SMALL, LARGE = Off(1), Chain(4), DDTree(4), DDTree(8)
DRAFTS = StepKind.DRAFTS
POLICIES = (OFF, CHAIN, SMALL, LARGE)
#: Tokens a step at T = 0 and at T = 1 with 1, 2, … rows.
FORECAST = {
    "chain": ([1.0, 1.4, 1.7, 2.0], [1.0, 1.2, 1.3, 1.4]),
    "ddtree": ([1.0, 1.5, 1.9, 2.2, 2.4, 2.6, 2.8, 3.0], [1.0, 1.3, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0]),
}
#: Trees of any policy that pay whatever they cost.
PROMISING: Any = {policy.name: ([9.0], [9.0]) for policy in POLICIES}


@dataclass
class Watch:
    """A clock that tests move."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def selector(seconds: Mapping[Policy, float], forecast: Any = FORECAST) -> PolicySelector:
    """Costs at a batch of one, on a clock that stands still."""
    times = StepTimes.of({(policy, 1): s for policy, s in seconds.items()})
    return PolicySelector(POLICIES, times, forecast, Watch())


def serve(own: PolicySelector, accepted: list[int], factor: float = 1.0, temperature: float = 0.0) -> Policy:
    """A step of one request or more that takes `factor` times as long as measured; returns its policy."""
    choice, watch, began = own.choose(1, temperature), own.clock, own.clock()
    assert isinstance(watch, Watch)
    watch.now += factor * own.times.seconds[choice.policy, 1]
    own.update(choice, accepted, began=began)
    return choice.policy


def tokens_of(own: PolicySelector, policy: Policy, remaining: float = math.inf) -> float:
    """Tokens a step of a request of which nothing is known, at T = 0."""
    gains = Gains.of([forecast_gain(own.forecast, policy, 0.0, own.slots)])
    return float(_before_the_end(gains.tokens(own.usual.shown([], own.slots)), remaining)[0, 0])


# -- the forecast ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "temperature", "tau"),
    [
        (CHAIN, 0.0, 2.0),
        (CHAIN, 1.0, 1.4),
        (CHAIN, 0.25, 1.85),
        (CHAIN, 1.7, 1.4),
        (Chain(2), 0.5, 1.3),
        (LARGE, 0.0, 3.0),
        (SMALL, 1.0, 1.6),
        (DDTree(64), 0.0, 3.0),
        (OFF, 0.0, 1.0),
        (Hybrid(8, 2), 0.0, 1.0),
    ],
)
def test_the_forecast(policy: Policy, temperature: float, tau: float) -> None:
    """A straight line between T = 0 and 1 and flat beyond; past a curve's end its end; 1 where nothing is known."""
    assert forecast_gain(FORECAST, policy, temperature).drafts == pytest.approx(tau - 1)
    assert forecast_tau(FORECAST, policy, temperature) == pytest.approx(tau)


def test_curves_of_different_length_end_each_where_it_ends() -> None:
    gain = forecast_gain({"chain": ([1.0, 2.0], [1.0, 1.5, 3.0])}, Chain(3), 0.5)
    assert gain.drafts == pytest.approx(1.5)


def test_the_forecast_of_copies() -> None:
    """A copy has as many tokens as a block; of what it brings, the share that fits is read from both curves."""
    curves: Any = {**FORECAST, "ddtree+lookup": ([1.0, 1.7, 2.3, 2.7], [1.0, 1.4, 1.8, 2.0])}
    curves["ddtree"] = ([1.0, 1.5, 1.9, 2.2], [1.0, 1.3, 1.5, 1.6])
    shares = [forecast_gain(curves, DDTree(rows, lookup=True), 0.0, 7).share for rows in (2, 3, 4, 64)]
    assert shares == pytest.approx([0.4, 0.8, 1.0, 1.0])
    assert forecast_gain(curves, DDTree(3, lookup=True), 0.0, 7).copies == 7
    assert forecast_gain(curves, DDTree(3), 0.0, 7).copies == 0
    assert forecast_gain(FORECAST, DDTree(3, lookup=True), 0.0, 7).share == 1.0
    assert forecast_gain(curves, Lookup(4), 0.0, 7)[:3] == (0.0, 3, 3)
    assert forecast_tau(curves, DDTree(3, lookup=True), 0.0) == pytest.approx(2.3)
    assert forecast_tau(FORECAST, DDTree(3, lookup=True), 0.0) == pytest.approx(1.9)


# -- the choice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "temperature", "best"),
    [
        ({OFF: 1.0, CHAIN: 1.5, SMALL: 1.6, LARGE: 2.0}, 0.0, LARGE),  # 1, 1.33, 1.375, 1.5
        ({OFF: 1.0, CHAIN: 1.5, SMALL: 1.4, LARGE: 2.0}, 0.0, SMALL),  # 1.57
        ({OFF: 1.0, CHAIN: 1.1, SMALL: 1.4, LARGE: 2.0}, 0.0, CHAIN),  # 1.82
        ({OFF: 1.0, CHAIN: 2.0, SMALL: 2.2, LARGE: 3.0}, 0.0, OFF),  # all 1
        ({OFF: 1.0, CHAIN: 1.5, SMALL: 1.6, LARGE: 2.0}, 1.0, OFF),  # 0.93, 1, 1
        ({OFF: 1.0, CHAIN: 1.1, SMALL: 1.4, LARGE: 2.0}, 1.0, CHAIN),  # 1.27, 1.14, 1
        ({OFF: 1.0, SMALL: 9.0}, 0.0, OFF),
        ({OFF: 1.0}, 0.0, OFF),
    ],
)
def test_the_most_tokens_a_second(seconds: dict[Policy, float], temperature: float, best: Policy) -> None:
    assert selector(seconds).choose(1, temperature).policy == best


def test_speculation_must_promise_a_margin() -> None:
    for gain, best in ((MARGIN * 0.999, OFF), (MARGIN * 1.001, CHAIN)):
        assert selector({OFF: 1.0, CHAIN: 2.0 / gain}).choose(1, 0.0).policy == best


def test_what_speculates_goes_on_without_a_margin() -> None:
    own = selector({OFF: 1.0, CHAIN: 1.98})  # 2 tokens
    for drafts, best in ((1.0, OFF), (1.2, CHAIN), (1.0, CHAIN), (0.97, OFF), (1.0, OFF)):
        own.usual.drafts = drafts
        choice = own.choose(1, 0.0)
        assert choice.policy == best
        own.update(choice, [2])


def test_a_choice_that_is_not_launched_begins_nothing() -> None:
    """The engine collects the step before first, and asks again: the margin for beginning is still due."""
    own = selector({OFF: 1.0, CHAIN: 1.98})
    own.usual.drafts = 1.2
    assert own.choose(1, 0.0).policy == CHAIN
    own.usual.drafts = 1.0
    assert own.choose(1, 0.0).policy == OFF


def test_the_last_tokens_are_not_drafted() -> None:
    """A chain makes 2 tokens in 1.4 s: lengths of 1, 2, … with chances of 1/2, 1/4, …, cut to what is left."""
    own = selector({OFF: 1.0, CHAIN: 1.4})
    assert [tokens_of(own, CHAIN, left) for left in (1, 2, 3, math.inf)] == [1.0, 1.5, 1.75, 2.0]
    assert [own.choose(1, 0.0, remaining=left).policy for left in (1, 2, 3, 4)] == [OFF, CHAIN, CHAIN, CHAIN]


# -- what serving teaches ----------------------------------------------------------------------------------------------

CHEAP = {OFF: 1.0, CHAIN: 0.1}  # a chain is chosen whatever has been learned


def test_what_was_promised_teaches_nothing() -> None:
    own = selector(CHEAP)
    serve(own, [1, 3, 2, 2])
    serve(own, [1, 3, 1, 1, 2, 2, 1, 3, 2, 1], temperature=0.5)  # 1.7 a step
    assert own.usual.drafts == pytest.approx(1.0)
    assert own.served.by_kind[DRAFTS] == pytest.approx(1.0)
    assert own.served.plain == 1.0


@pytest.mark.parametrize(("accepted", "limit"), [([1], 0.0), ([1, 2], 0.5), ([2, 4], 2.0)])
def test_forecasts_go_to_what_is_seen(accepted: list[int], limit: float) -> None:
    own = selector(CHEAP)
    before = [tokens_of(own, CHAIN) - 1]
    for _ in range(400):
        assert serve(own, accepted) == CHAIN
        before.append(tokens_of(own, CHAIN) - 1)
    assert before == sorted(before, reverse=limit < 1)
    assert before[-1] == pytest.approx(limit, abs=0.04)
    assert tokens_of(own, OFF) == 1.0


def test_a_text_that_is_drafted_well_gains_more_from_a_deep_tree() -> None:
    """Twice the odds of each draft: a chain of 2 nodes has one chance, one of 4 has three."""
    own = selector(CHEAP)
    before = [tokens_of(own, policy) - 1 for policy in (Chain(2), CHAIN)]
    own.usual.drafts = 2.0
    more = [tokens_of(own, policy) - 1 for policy in (Chain(2), CHAIN)]
    chance = 0.4 / 0.6 * 2 / (1 + 0.4 / 0.6 * 2)
    assert more[0] == pytest.approx(chance, abs=1e-3)
    assert more[1] / before[1] > more[0] / before[0]


def test_plain_steps_forget_from_both_sides() -> None:
    for start in (0.2, 1.8):
        own = selector({OFF: 1.0})
        own.usual.drafts = own.served.by_kind[DRAFTS] = start
        for step in range(1, 400):
            serve(own, [1, 1])
            assert own.usual.drafts == pytest.approx(1 + (start - 1) * (1 - 1 / 2048) ** step)
            assert own.served.by_kind[DRAFTS] == pytest.approx(1 + (start - 1) * (1 - 1 / 256) ** step)


def test_texts_that_disappoint_are_served_plainly_and_speculation_comes_back() -> None:
    own = selector({OFF: 1.0, CHAIN: 1.5})
    promised, served = list[float](), list[Policy]()
    for _ in range(500):
        promised.append(tokens_of(own, CHAIN) * own.kept[DRAFTS])
        served.append(serve(own, [1]))
    turns = [a for a, b in pairwise(served) if a != b]
    assert served[0] == CHAIN
    assert served.index(OFF) == next(step for step, tokens in enumerate(promised) if tokens <= 1.5)
    assert own.kept[DRAFTS] < promised[served.index(OFF)], "what is left of a promise is learned too, and forgotten"
    assert turns[:3] == [CHAIN, OFF, CHAIN]


def test_steps_that_take_longer_than_measured_are_served_plainly() -> None:
    """A chain makes 2 tokens in 1.5 s: a step of 1.5 x 1.334 s is too long."""
    own = selector({OFF: 1.0, CHAIN: 1.5})
    served = [serve(own, [2], 1.5) for _ in range(40)]
    scale, error, steps = 1.0, 1.0, 0
    while scale * error < 2 / 1.5:  # of all steps that draft, and of those of this policy and batch size
        scale, error = scale + (1.5 / error - scale) / 8, error + error * (1.5 / (scale * error) - 1) / 16
        steps += 1
    assert served.index(OFF) == steps < 9
    assert own.usual.drafts == 1.0


def test_a_machine_that_is_slower_for_all_policies_changes_nothing() -> None:
    own = selector({OFF: 1.0, CHAIN: 1.5})
    own.served.plain = 1.5
    assert {serve(own, [2], 1.5) for _ in range(40)} == {CHAIN}
    assert own.served.by_kind[DRAFTS] == pytest.approx(1.0)


@pytest.mark.parametrize(("factor", "limit"), [(50.0, 2.0), (0.001, 0.5)])
def test_one_step_shows_at_most_a_factor_of_two(factor: float, limit: float) -> None:
    """Whatever else the machine did during it; plain steps are watched as the others are."""
    own = selector(CHEAP)
    serve(own, [2], factor)
    assert own.served.by_kind[DRAFTS] == pytest.approx(1 + (limit - 1) / 8)
    own = selector({OFF: 1.0})
    serve(own, [1], factor)
    assert own.served.plain == pytest.approx(1 + (limit - 1) / 32)


def test_each_kind_of_step_corrects_its_own_kind() -> None:
    copy = Lookup(4)
    times = StepTimes.of({(OFF, 1): 1.0, (copy, 1): 1.0, (CHAIN, 1): 1.0})
    for kind, policy in enumerate((OFF, copy, CHAIN)):
        own = PolicySelector([OFF, copy, CHAIN], times, FORECAST, watch := Watch())
        choice = Choice(policy, 1.0, 1, 0.0)
        watch.now = 1.5
        own.update(choice, [1], began=0.0)
        scales = [own.served.plain, *own.served.by_kind[1:]]
        assert scales.pop(kind) > 1.01
        assert max(scales) == 1.0


def test_what_one_step_lost_is_forgotten_while_others_run() -> None:
    """A step that was slow in a bad moment is not served again, so that it can show nothing itself."""
    own = selector({OFF: 1.0, CHAIN: 1.0})
    for policy, took, steps in ((CHAIN, 2.0, 8), (OFF, 1.0, 1500)):
        for _ in range(steps):
            own.clock.now += took  # type: ignore[attr-defined]
            own.update(Choice(policy, 1.0, 1, 0.0), [1], began=own.clock() - took)
        (errors,) = own.served._errors.values()
        assert (errors[1] > 1.1) == (policy is CHAIN)
    assert errors[1] == pytest.approx(1.0, abs=0.01)


def test_drafters_are_considered_again_after_eight_plain_steps_or_a_draft() -> None:
    times = StepTimes.of({(OFF, 1): 1.0, (Lookup(4), 1): 1.0, (CHAIN, 1): 1.0})
    own = PolicySelector([OFF, Lookup(4), CHAIN], times, FORECAST, Watch(), verify=RowTimes.of(times))
    request, held = own.usual.request(), list[bool]()
    asked = Asked(1, 0.0, 0.0, math.inf, {}, [request])
    own.plans(asked)
    for _ in range(20):
        held.append(own._holds(asked))
        own.update(Choice(OFF, 1.0, 1, 0.0), [1], requests=[request])
    assert held == [step % 9 != 0 for step in range(20)]
    own.update(Choice(CHAIN, 1.0, 1, 0.0), [1], requests=[request])
    assert not own._holds(asked)


def test_the_time_of_catching_up_is_expected() -> None:
    times = StepTimes({(OFF, 1): 1.0, (CHAIN, 1): 0.1}, {}, {FIRST: 0.03})
    own = PolicySelector(POLICIES, times, FORECAST, watch := Watch())
    choice = own.choose(1, 0.0, pending={FIRST: 100})
    assert choice.policy == CHAIN
    watch.now = 3.1
    own.update(choice, [2], began=0.0)
    assert own.served.by_kind[DRAFTS] == pytest.approx(1.0)


def test_a_step_that_runs_ahead_begins_when_the_one_before_it_ends() -> None:
    """The host launches it earlier; and a step with other work in it says nothing about its time."""
    own = selector({OFF: 1.0})
    watch, chosen = own.clock, []
    assert isinstance(watch, Watch)
    for _ in range(20):
        chosen.append((own.choose(1, 0.0), watch.now))
        if len(chosen) > 1:
            watch.now += 1.0
            choice, began = chosen.pop(0)
            own.update(choice, [1], began=began)
    assert own.served.plain == pytest.approx(1.0)
    watch.now += 9.0
    own.update(choice, [1])
    assert own.served.plain == pytest.approx(1.0)
    watch.now += 2.0
    own.update(choice, [], began=watch.now - 2.0)
    assert own.served.plain == pytest.approx(1.0), "all its requests had ended"


COPYING = DDTree(4, lookup=True)  # makes 2.2 tokens, with copies 2.7
COPIES = {**FORECAST, "ddtree+lookup": ([1.0, 1.7, 2.3, 2.7], [1.0, 1.4, 1.8, 2.0])}


def request(own: PolicySelector, *, repeats: bool, drafts: float = 0.1) -> RequestAcceptance:
    """A request whose drafts are hardly ever right, and whose text repeats itself or does not."""
    known = own.usual.request()
    known.read([1, 2, 3, 4, 5] * 6 if repeats else list(range(30)))
    known.drafts, known.steps = drafts, 400
    return known


def test_rows_go_to_the_requests_that_earn_them() -> None:
    """A row costs 0.1 of a step of four, 0.4 of a token: the copies that are right more often get one each."""
    copy = Lookup(4)
    costs: dict[tuple[Policy, int], float] = {(OFF, 1): 0.7, (OFF, 2): 0.8, (OFF, 4): 1.0, (copy, 4): 2.2}
    times = StepTimes.of(costs)
    own = PolicySelector([OFF, copy], times, COPIES, verify=RowTimes.of(times))
    known = [request(own, repeats=repeats) for repeats in (True, False, True, False)]
    assert (own.usual.shown(known, 3).runs[[0, 2]] > 0.4).all()
    choice = own.choose(4, 0.0, requests=known)
    assert (choice.policy, choice.rows) == (copy, (4, 1, 4, 1))
    assert choice.seconds == pytest.approx(1.6)
    choice = own.choose(4, 0.0, requests=[known[1]] * 4)
    assert (choice.policy, choice.seconds, choice.rows, choice.bucket) == (OFF, 1.0, None, 4)
    smaller = PolicySelector([OFF, copy], times, COPIES, verify=RowTimes.of(times))
    choice = smaller.choose(4, 0.0, requests=known[:3])
    assert (choice.policy, choice.rows) == (copy, (4, 1, 4)), "of a bucket of four"


def test_seconds_of_rows_lie_on_lines_between_measured_steps() -> None:
    copy = Lookup(4)
    costs: dict[tuple[Policy, int], float] = {
        (OFF, 1): 1.0,
        (OFF, 2): 0.9,
        (copy, 1): 2.0,
        (copy, 2): 4.0,
        (SMALL, 2): 9.0,
    }
    times = RowTimes.of(StepTimes.of(costs))
    assert times is not None
    assert times.points == ((1, 1.0), (2, 1.0), (4, 2.0), (8, 4.0)), (
        "more rows never take less, and drafts are left out"
    )
    assert times(np.array([1, 2, 3, 4, 6, 8, 10])).tolist() == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
    assert RowTimes.of(StepTimes.of({(OFF, 1): 1.0, (SMALL, 1): 2.0})) is None


def test_each_request_learns_for_itself_and_all_teach_the_next() -> None:
    own = PolicySelector([OFF, CHAIN], StepTimes.of({(OFF, 2): 1.0, (CHAIN, 2): 0.1}), COPIES, Watch())
    bad, good = own.usual.request(), own.usual.request()
    for _ in range(60):
        choice = own.choose(2, 0.0, requests=[bad, good])
        own.update(choice._replace(policy=CHAIN), [1, 4], [False, False], [bad, good])
    assert bad.drafts < 0.1
    assert good.drafts > 5
    assert bad.drafts < own.usual.drafts < good.drafts
    assert own.usual.request().drafts == own.usual.drafts


def test_a_step_that_a_copy_won_says_nothing_of_drafts() -> None:
    own = PolicySelector([OFF, COPYING], StepTimes.of({(OFF, 1): 1.0, (COPYING, 1): 0.1}), COPIES, Watch())
    known = own.usual.request()
    for _ in range(20):
        choice = own.choose(1, 0.0, requests=[known])
        own.update(choice._replace(policy=COPYING), [4], [True], [known])
    assert (known.drafts, own.usual.drafts, known.steps) == (1.0, 1.0, 0)


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass
class Scripted:
    """An executor that computes nothing and moves a clock: `cost` by rows and batch, 1 s a pass of a drafter."""

    cost: Callable[[int, int], float]
    slow: frozenset[int] = frozenset()  # verifications that a busy machine makes a hundred times as long
    now: float = 0.0
    settled: tuple[DrafterRole, ...] = ()
    verified: Counter[tuple[int, int]] = field(default_factory=Counter)
    device: str = "cpu"
    vocab_size: int = 32
    block_size: int = 4
    blocks: Mapping[DrafterRole, Block] = field(default_factory=lambda: dict.fromkeys(DrafterRole, Block(4, 3)))
    static_shapes: bool = False
    page_counts: tuple[int, ...] = (8,)
    state_bytes: int = 0
    capture: None = None

    drafting: float = 1.0  # seconds of a pass of a drafter
    committing: float = 0.25
    pending_rows: tuple[DrafterRole, ...] = ()

    @property
    def context(self) -> Scripted:
        return self

    @property
    def drafts(self) -> Scripted:
        return self

    @property
    def layout(self) -> Scripted:
        return self

    def inject(self, drafters: Collection[DrafterRole], where: Where | None = None) -> None:
        self.settled = tuple(drafters)

    def scratch(self, requests: int, columns: int, context_len: int = 0) -> Where:
        return Where.scratch(requests, columns, context_len)

    def _pass(self, batch: Batch, role: DrafterRole, *shape: int) -> Draft:
        assert role in self.settled
        self.now += self.drafting
        size = len(batch.anchor), *shape
        return Draft(torch.arange(shape[-1]).expand(size), torch.full(size, -1.0))

    def first(self, batch: Batch, width: int) -> Draft:
        return self._pass(batch, DrafterRole.FIRST, 3, width)

    def second(self, batch: Batch, branches: Branches, role: DrafterRole, width: int) -> Draft:
        return self._pass(batch, role, branches.prefix_len.shape[1], 3, width)

    def verify(self, batch: Batch, tree: Tree, joining: Joining | None = None) -> Verified:
        assert not batch.active.any()
        assert 0 <= int(batch.where.pages.min()) <= int(batch.where.pages.max()) < self.page_counts[0]
        size, rows = tree.tokens.shape
        self.now += self.cost(rows, size) * (100 if self.verified.total() in self.slow else 1)
        self.verified[rows, size] += 1
        return Verified(tree.tokens, torch.zeros(size, rows, self.vocab_size), None)  # type: ignore[arg-type]

    def commit(self, batch: Batch, verified: Verified, accepted: Accepted) -> None:
        self.now += self.committing


def measured(
    runner: Scripted,
    policies: Sequence[Policy],
    forecast: Any,
    max_batch: int = 1,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[tuple[Policy, int], float]:
    return time_steps(timer_of(runner, max_batch), policies, forecast, {}, advance)


def timer_of(runner: Scripted | ModelRunner, max_batch: int, max_context: int = 64, **when: Any) -> StepTimer:
    model, limits = cast(ModelRunner, runner), Limits(max_batch, max_context, 4, 16)
    if isinstance(runner, Scripted):
        when = {"clock": lambda: runner.now, **when}
    return StepTimer(model, limits, DecodeSteps(model, limits), **when)


def test_costs_are_those_of_whole_steps() -> None:
    """A step is both passes, the target and the commit, in every bucket; a bucket advances the bar by one."""
    told: list[int] = []
    runner = Scripted(lambda rows, size: rows * size)
    trees = (CHAIN, LARGE, Hybrid(8, 2))
    forecast = {policy.name: ([9.0], [9.0]) for policy in trees}
    found = measured(runner, (OFF, *trees), forecast, 3, told.append)
    passes = {OFF: 0, CHAIN: 1, LARGE: 1, trees[2]: 2}
    assert found == {
        (policy, size): policy.num_nodes * size + passes[policy] + 0.25
        for policy in (OFF, *trees)
        for size in (1, 2, 3)
    }
    assert told == [1, 1, 1]


def test_steps_are_timed_again_without_graphs_after_a_refused_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, taken = SimpleNamespace(refused=False), iter([5.0, 1.0])

    def timed(*_: object, **__: object) -> dict[tuple[Policy, int], float]:
        steps.refused = True
        return {(OFF, 1): next(taken)}

    monkeypatch.setattr("d2sd.runtime.step_times.time_steps", timed)
    monkeypatch.setattr("d2sd.runtime.step_times.time_context", lambda *_: {})
    runner = cast(ModelRunner, Scripted(lambda rows, size: 1.0))
    monkeypatch.setattr("d2sd.runtime.step_times.time_pending", lambda _: [])
    found = measure_step_times(runner, (OFF,), {}, Limits(1, 64, 4, 16), steps=cast(DecodeSteps, steps))
    assert found.seconds == {(OFF, 1): 1.0}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_context_adds_to_a_step(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    """On a CPU to that of every policy; a GPU reads it once for all rows, which plain decoding shows."""
    timed: list[tuple[Policy, int]] = []

    def seconds_of(timer: StepTimer, policy: Policy, batch: Batch, repeats: int) -> float:
        timed.append((policy, int(batch.where.context_len[0])))
        return 1.0 + len(batch.anchor) * policy.num_nodes * int(batch.where.context_len[0])

    monkeypatch.setattr(StepTimer, "seconds", seconds_of)
    runner = Scripted(lambda rows, size: 1.0)
    timer = timer_of(runner, 2, 512)
    seconds = time_steps(timer, (OFF, CHAIN), {"chain": ([9999.0], [9999.0])}, {})
    runner.static_shapes = on_gpu
    rows = 1 if on_gpu else CHAIN.num_nodes
    assert time_context(timer, seconds) == {(OFF, 1): 1.0, (CHAIN, 1): rows, (OFF, 2): 2.0, (CHAIN, 2): 2.0 * rows}
    longer = [(OFF, 512), (CHAIN, 512)] if not on_gpu else [(OFF, 512)]
    assert timed == [(policy, 64) for policy in (OFF, CHAIN)] * 2 + longer * 2
    assert time_context(timer_of(runner, 2), seconds) == {}


def measured_within(runner: Scripted, max_batch: int = 8, known: StepTimes | None = None) -> StepTimes:
    limits = Limits(max_batch, 1024, 4, 16)
    return measure_step_times(
        cast(ModelRunner, runner), POLICIES, PROMISING, limits, known=known, clock=lambda: runner.now
    )


@pytest.mark.parametrize("pace", [0.001, 0.02, 0.1, 0.5])
def test_measuring_ends_in_time_on_any_machine(pace: float) -> None:
    """Whatever a step takes, all is over in ten seconds and the one step that had begun."""
    runner = Scripted(lambda rows, size: pace * (1 + rows * size / 8), drafting=pace, committing=pace)
    found = measured_within(runner)
    longest = pace * (1 + 8) + 2 * pace
    assert runner.now <= LIMIT + longest
    assert {size for policy, size in found.seconds if policy == OFF} == {1, 2, 3, 4, 6, 8}
    assert (found.guessed == frozenset()) == (pace == 0.001)
    assert {(OFF, 1)} <= found.seconds.keys() - found.guessed or pace == 0.5
    assert PolicySelector(POLICIES, found, FORECAST).choose(8, 0.0).policy in POLICIES


def test_what_was_not_measured_lies_on_the_line_of_what_was() -> None:
    """Steps take 1 s and 0.5 s a row of each request: at sizes 1 and 2 both are seen, at 8 the line says 5 s."""
    known: dict[tuple[Policy, int], float] = {(OFF, 1): 1.5, (OFF, 2): 2.0, (CHAIN, 1): 3.0, (CHAIN, 2): 5.0}
    known[SMALL, 1] = 3.0
    timer = timer_of(Scripted(lambda rows, size: 1.0), 8, end=0.0)

    def told(forecast: Any, more: dict[tuple[Policy, int], float]) -> dict[tuple[Policy, int], float]:
        """Without a second to measure."""
        return time_steps(timer, POLICIES, forecast, known | more)

    whole = told(PROMISING, {})
    assert {size: whole[OFF, size] for size in (1, 2, 4, 8)} == {1: 1.5, 2: 2.0, 4: 3.0, 8: 5.0}
    assert {size: whole[CHAIN, size] for size in (1, 2, 4, 8)} == {1: 3.0, 2: 5.0, 4: 9.0, 8: 17.0}
    assert [whole[SMALL, size] for size in (1, 2, 8)] == [3.0, 6.0, 24.0], "one size alone grows with the batch"
    assert not any(policy == LARGE for policy, _ in whole), "of which nothing is known"
    assert min(told(PROMISING, {(CHAIN, 2): 1.0}).values()) > 0, "a line that falls"
    assert (LARGE, 8) not in told({}, {(LARGE, 1): 4.0}), "a smaller tree of this policy cannot pay there"


def test_a_later_start_measures_what_the_first_left_out() -> None:
    runner = Scripted(lambda rows, size: 0.02 * (1 + rows * size / 8), drafting=0.02, committing=0.02)
    whole = Scripted(runner.cost, drafting=0.02, committing=0.02)
    times, starts = measured_within(runner), 1
    while times.guessed:
        kept = {step: seconds for step, seconds in times.seconds.items() if step not in times.guessed}
        added = {step: seconds for step, seconds in times.context.items() if step not in times.guessed}
        begun, verified, starts = runner.now, runner.verified.copy(), starts + 1
        times = measured_within(runner, known=StepTimes(kept, added, {}))
        assert runner.now - begun <= LIMIT + 0.3
        assert times.seconds.items() >= kept.items()
        assert runner.verified.total() > verified.total()
    assert 1 < starts < 6
    alone = time_steps(timer_of(whole, 8, 1024), POLICIES, PROMISING, {})
    assert times.seconds == pytest.approx(alone)


@pytest.mark.parametrize(("device", "limited"), [("cpu", True), ("cuda", False), ("cuda:1", False)])
def test_a_gpu_is_measured_to_the_end(monkeypatch: pytest.MonkeyPatch, device: str, limited: bool) -> None:
    """Steps of a GPU must be compiled and captured anyway."""
    runner, ends = Scripted(lambda rows, size: 1.0, device=device, now=5.0), list[float]()

    def timed(timer: StepTimer, *given: Any) -> dict[tuple[Policy, int], float]:
        ends.append(timer.end)
        *_, measured, _ = given
        measured[OFF, 1] = 1.0
        return dict(measured)

    monkeypatch.setattr("d2sd.runtime.step_times.time_steps", timed)
    monkeypatch.setattr("d2sd.runtime.step_times.time_context", lambda *_: {})
    steps = cast(DecodeSteps, SimpleNamespace(refused=False))
    model, limits = cast(ModelRunner, runner), Limits(1, 64, 4, 16)
    assert not measure_step_times(model, (OFF,), {}, limits, steps=steps, clock=lambda: runner.now).guessed
    assert ends == [pytest.approx(12.0) if limited else math.inf]


@pytest.mark.parametrize(("truth", "best"), [(0.5, CHAIN), (1.9, CHAIN), (4.0, OFF)])
def test_serving_corrects_what_was_guessed(truth: float, best: Policy) -> None:
    """A chain makes 2 tokens a step, guessed at 1.5 plain ones; its steps take `truth`, and others nothing anew."""
    costs: dict[tuple[Policy, int], float] = {(OFF, 1): 1.0, (CHAIN, 1): 1.5}
    times = StepTimes(costs, {}, {}, frozenset({(CHAIN, 1)}))
    own = PolicySelector(POLICIES, times, FORECAST, watch := Watch())
    for _ in range(12):
        choice, began = own.choose(1, 0.0), watch.now
        drafts = choice.policy == CHAIN
        watch.now += truth if drafts else 1.0
        own.update(choice, [2] if drafts else [1], began=began)
    assert own.choose(1, 0.0).policy == best
    assert own.served.plain == pytest.approx(1.0)
    assert own.times.seconds[OFF, 1] == 1.0
    if best == CHAIN:
        assert own.times.seconds[CHAIN, 1] == pytest.approx(truth, rel=0.2)
        assert own.served.by_kind[DRAFTS] == pytest.approx(1.0, abs=0.1)
    assert times.seconds[CHAIN, 1] == 1.5, "another engine's selector may share them"
    assert own.fresh().times is times, "as one that has seen no step"


@pytest.mark.parametrize("turn", [0, 1])
def test_what_slows_one_turn_on_a_cpu_is_not_measured(turn: int) -> None:
    """A second of other work, in which all steps of a batch are timed once; each has three runs in a turn."""
    slow = frozenset(range(6 * turn, 6 * (turn + 1)))
    runner = Scripted(lambda rows, size: 1.0, slow=slow)
    found = time_steps(timer_of(runner, 1, end=1e6), (OFF, CHAIN), {"chain": ([2.0], [2.0])}, {})
    assert found == {(OFF, 1): 1.25, (CHAIN, 1): 2.25}
    assert runner.verified.total() == 12


def test_trees_larger_than_one_that_cannot_pay_are_not_tried() -> None:
    """At other sizes all pay; at two, a tree of 4 rows takes longer than its best forecast allows: 8 is left out.

    Another kind of tree is tried nevertheless, and so is the same one at the next size.
    """
    runner = Scripted(lambda rows, size: 1.0 if size != 2 or rows == 1 else 10.0)
    forecast = {"chain": ([9.0], [9.0]), "ddtree": ([1.0, 2.0], [1.0, 4.0])}
    found = measured(runner, POLICIES, forecast, 4)
    assert found.keys() == {(policy, size) for policy in POLICIES for size in (1, 2, 3, 4)} - {(LARGE, 2)}
    assert (8, 2) not in runner.verified


@pytest.mark.parametrize(
    ("max_batch", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (5, [1, 2, 3, 4, 6]), (9, [1, 2, 3, 4, 6, 8, 12])]
)
def test_buckets_hold_every_batch(max_batch: int, sizes: list[int]) -> None:
    assert buckets(max_batch) == sizes
    assert [bucket(count) for count in range(1, max_batch + 1)] == [
        min(size for size in sizes if size >= count) for count in range(1, max_batch + 1)
    ]
    found = measured(Scripted(lambda rows, size: 1.0), (OFF,), {}, max_batch)
    assert found == {(OFF, size): 1.25 for size in sizes}


@pytest.mark.parametrize("page_size", [1, 4])
def test_real_models_are_measured_on_page_0_alone(page_size: int) -> None:
    """Pages smaller than a block too; and with requests running nobody's text changes."""
    runner = honest()
    engine = make_engine(runner, "off", page_size=page_size)
    trees = CHAIN, DDTree(8), Hybrid(8, BRANCHES)
    timer = StepTimer(runner, engine.limits, engine.steps)
    found = time_steps(timer, (OFF, *trees), {p.name: ([99.0], [99.0]) for p in trees}, {})
    assert found.keys() == {(policy, size) for policy in (OFF, *trees) for size in (1, 2, 3, 4)}
    assert min(found.values()) > 0
    for pool in runner.pools:
        assert not pool.k[:, 1:].any()
        assert not pool.v[:, 1:].any()
    requests = some_requests()[:3]
    assert [s.answer for s in engine.generate(requests)] == [expected(r) for r in requests]


# -- the engine --------------------------------------------------------------------------------------------------------


def scripted(monkeypatch: pytest.MonkeyPatch, engine: Engine, seconds: dict[tuple[Policy, int], float]) -> None:
    """Let an engine adapt to costs made by hand, with forecasts that keep every promise."""
    policies = sorted({policy for policy, _ in seconds}, key=lambda policy: policy.num_nodes)
    forecast: dict[str, Any] = {policy.name: ([2.0], [2.0]) for policy in policies if policy != OFF}
    with monkeypatch.context() as patch:
        patch.setattr("d2sd.runtime.step_times.time_steps", lambda *arguments, **settings: seconds)
        engine.enable_auto(policies, forecast)


def test_policy_follows_the_batch_size_and_responses_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone a tree of both drafters, two in flight a chain, three or four plain decoding, in one run."""
    requests = some_requests()
    engine = make_engine(cheater(requests), "d2sd", max_batch=4)
    wide, chain = Hybrid(14, BRANCHES), Chain(BLOCK)
    costs: dict[tuple[Policy, int], float] = {(OFF, 1): 9.0, (OFF, 2): 9.0, (OFF, 3): 1.0, (OFF, 4): 1.0}
    costs |= {(wide, 1): 0.001, (wide, 4): 9.0, (chain, 1): 8.0, (chain, 2): 0.001}
    scripted(monkeypatch, engine, costs)
    served = Counter[tuple[int, str]]()
    engine.record_trace = True
    step = engine.step

    def watched() -> Any:
        outputs = step()
        if outputs and engine.trace is not None:
            assert engine.trace.policy is engine.served
            served[len(engine.trace.sequences), engine.served.name] += 1
        return outputs

    monkeypatch.setattr(engine, "step", watched)
    learned = Counter[str]()
    monkeypatch.setattr(PolicySelector, "update", lambda self, choice, *more, **_: learned.update([choice.policy.name]))
    sequences = run_staggered(engine, requests, gap=2)
    assert [s.answer for s in sequences] == [expected(r) for r in requests]
    assert learned == sum((Counter({name: count}) for (_, name), count in served.items()), Counter())
    assert served.keys() == {(1, "hybrid"), (2, "chain"), (3, "off"), (4, "off")}
    rows = {"hybrid": 14, "chain": BLOCK, "off": 1}
    assert sum(s.stats.verified_nodes for s in sequences) == sum(
        n * rows[name] * count for (n, name), count in served.items()
    )


@pytest.mark.parametrize("auto", [False, True])
def test_a_request_chooses_its_policy_while_no_other_one_speculates(
    monkeypatch: pytest.MonkeyPatch, auto: bool
) -> None:
    """Neither the steps of others nor what `auto` has learned change by it, and no text does."""
    requests, wished = some_requests()[:2], Hybrid(14, BRANCHES)
    engine = make_engine(cheater(requests), "d2sd")
    own = engine.policy
    with pytest.raises(RequestError, match="not available"):
        engine.submit(switched(requests[0], {"policy": "hybrid"}))
    engine.offer({"hybrid": wished})
    if auto:
        scripted(monkeypatch, engine, {(CHAIN, 1): 1.0, (CHAIN, 2): 1.0, (OFF, 1): 9.0, (OFF, 2): 9.0})
        own = CHAIN
    engine.record_trace, served = True, Counter[tuple[tuple[int, ...], Policy]]()
    wishing = engine.submit(replace(switched(requests[0], {"policy": "hybrid"}), max_new_tokens=11))
    other = None
    while engine.busy:
        engine.step()
        if engine.trace is not None:
            served[tuple(s.id for s in engine.trace.sequences), engine.trace.policy] += 1
            assert engine.stats.policy == str(engine.trace.policy)
        if sum(served.values()) == 2:
            assert engine.selector is None or engine.selector.usual.drafts == 1.0
            other = other or engine.submit(requests[1])
    assert served.keys() == {((0,), wished), ((0, 1), own), ((1,), own)}
    assert other is not None
    assert [wishing.answer, other.answer] == [expected(s.request) for s in (wishing, other)]


def test_the_policy_follows_the_mean_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """At T = 0 the chain pays, at T = 1 it does not; two requests between are served as their mean says."""
    engine = make_engine(honest(), "off", max_batch=2)
    with monkeypatch.context() as patch:
        patch.setattr(
            "d2sd.runtime.step_times.time_steps",
            lambda *a, **b: {(p, n): 1.0 + p.num_nodes / 10 for p in (OFF, CHAIN) for n in (1, 2)},
        )
        engine.enable_auto((OFF, CHAIN), {"chain": ([1.9], [1.0])})
    for temperatures, wanted in {(0.0,): CHAIN, (1.0,): OFF, (1.0, 0.0): CHAIN, (1.2, 0.4): OFF}.items():
        selector = engine.selector
        assert selector is not None
        selector.usual = Acceptance()
        selector.served.plain = selector.served.by_kind[DRAFTS] = 1.0
        running = [engine.submit(Request((5,), 40, SamplingParams(t, seed=1))) for t in temperatures]
        engine.step()
        assert engine.served == wanted, temperatures
        for sequence in running:
            engine.cancel(sequence)


def test_the_engine_learns_from_requests_but_not_from_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five requests in a batch of six: what the sixth row accepted is nobody's."""
    engine = make_engine(honest(), "off", max_batch=6)
    scripted(monkeypatch, engine, {**dict.fromkeys([(OFF, size) for size in buckets(6)], 1.0), (CHAIN, 6): 0.01})
    told: list[list[int]] = []
    monkeypatch.setattr(
        PolicySelector, "update", lambda self, choice, accepted, *more, **_: told.append(list(accepted))
    )
    sequences = [engine.submit(Request((n, n + 1), 4, SamplingParams(seed=n))) for n in (3, 4, 5, 6, 7)]
    engine.step()
    assert engine.served == CHAIN
    assert told == [[s.stats.tokens for s in sequences]]


def test_a_step_that_is_prepared_and_not_launched_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(honest(), "off")
    scripted(monkeypatch, engine, {(OFF, 1): 1.0, (CHAIN, 1): 0.01})
    assert engine.selector is not None
    engine.submit(some_requests()[0])
    sequences = engine.admit()
    steps = [engine.prepare(sequences) for _ in range(2)]
    assert [step.policy for step in steps] == [CHAIN] * 2
    assert steps[0].choice == steps[1].choice
    assert engine.selector == engine.selector.fresh()
    assert engine.stats.policy == "off"


@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_step_shows_beside_a_prefill(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """The host's work is learned where no prompt was prefilled between two ends; a step is timed unless it computes
    behind one on a GPU, or waits behind its launch to be read.
    """
    engine = make_engine(honest(), "off", max_batch=2)
    scripted(monkeypatch, engine, {(OFF, 1): 1.0, (OFF, 2): 1.0, (CHAIN, 1): 9.0, (CHAIN, 2): 9.0})
    if ahead:
        RecordedGraphs(rerun=True).guard(engine)
    shown: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        PolicySelector,
        "update",
        lambda self, choice, accepted, copied, known, began, waited: shown.append((began is None, waited is None)),
    )
    for first in (3, 4):
        engine.submit(Request((first, 5, 6), 9, SamplingParams()))
        for _ in range(4):
            engine.step()
    timed, neither, late = (False, False), (True, True), (True, False)
    if ahead:
        assert shown == [neither, timed, timed, neither, late, timed, timed]
    else:
        assert shown == [(False, True), timed, timed, timed] * 2
