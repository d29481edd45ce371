"""Fitted parameters against those the data was drawn with, and against the point where the likelihood is flat."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.policies import DraftUse
from d2sd.runtime.observe import NodeOutcome
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.train.confidence.fit import PRIOR, calibrated, error_of, fit, logistic

#: Mean and spread of what is said, then the true a and b: a modest drafter, sure ones, one that is better than it says.
WORLDS = [
    (0.0, 2.0, 0.8, -0.5),
    (3.0, 2.0, 0.5, -0.5),
    (5.0, 3.0, 0.2, -1.0),
    (-6.0, 2.0, 1.0, 4.0),
    (0.0, 1.0, 2.0, 1.0),
]


def drawn(mean: float, spread: float, a: float, b: float, count: int) -> tuple[Tensor, Tensor]:
    """Log-odds as a drafter says them, and what happened."""
    dice = torch.Generator().manual_seed(5)
    x = (mean + spread * torch.randn(count, generator=dice, dtype=torch.float64)).clamp(-30, 13.8)
    return x, (torch.rand(count, generator=dice, dtype=torch.float64) < torch.sigmoid(a * x + b)).double()


def said(
    logprob: float, right: bool = True, *, use: DraftUse = DraftUse.FIRST, distance: int = 0, sibling: bool = False
) -> NodeOutcome:
    return NodeOutcome(use, distance, sibling, logprob, right, 1)


def judged(x: Tensor, y: Tensor, **where: Any) -> list[NodeOutcome]:
    logprob = torch.nn.functional.logsigmoid(x)
    return [said(p, bool(right), **where) for p, right in zip(logprob.tolist(), y.tolist(), strict=True)]


@pytest.mark.parametrize(("mean", "spread", "a", "b"), WORLDS)
def test_recovers_what_the_data_was_drawn_with(mean: float, spread: float, a: float, b: float) -> None:
    assert logistic(*drawn(mean, spread, a, b, 20_000)) == pytest.approx((a, b), abs=0.1)


@pytest.mark.parametrize("count", [0, 1, 30, 2000])
@pytest.mark.parametrize(("mean", "spread", "a", "b"), WORLDS)
def test_ends_where_the_likelihood_with_its_prior_is_flat(
    mean: float, spread: float, a: float, b: float, count: int
) -> None:
    x, y = drawn(mean, spread, a, b, count)
    slope, offset = logistic(x, y)
    missing = torch.sigmoid(slope * x + offset) - y
    assert float((missing * x).sum()) + PRIOR * (slope - 1) == pytest.approx(0, abs=1e-3)
    assert float(missing.sum()) + PRIOR * offset == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("right", [0.0, 1.0])
@pytest.mark.parametrize("x", [13.8, 5.0, 0.0, -20.0])
def test_what_is_always_or_never_right_stays_finite(x: float, right: float) -> None:
    """A hundred answers and a prior of four: what is said goes to their side, whatever it was."""
    told, happened = torch.full((100,), x, dtype=torch.float64), torch.full((100,), right, dtype=torch.float64)
    slope, offset = logistic(told, happened)
    predicted = 1 / (1 + math.exp(-(slope * x + offset)))
    assert abs(predicted - right) < 0.15
    assert abs(offset) < 20


def test_a_drafter_that_lies_keeps_a_little_of_its_order() -> None:
    """And its offset is the best one beside that slope."""
    x, y = drawn(4.0, 2.0, -1.0, 2.0, 2000)
    slope, offset = logistic(x, y)
    assert 0 < slope < 0.1
    assert float(torch.sigmoid(slope * x + offset).mean()) == pytest.approx(float(y.mean()), abs=0.02)


@pytest.mark.parametrize("warm", [0, 1])
@pytest.mark.parametrize("use", DraftUse)
@pytest.mark.parametrize("sibling", [False, True])
def test_every_group_has_its_own_place(warm: int, use: DraftUse, sibling: bool) -> None:
    """Others keep the identity, but for uses that are like it; the place's own numbers are those of its data alone."""
    x, y = drawn(0.0, 2.0, 0.6, -1.0, 300)
    nodes = judged(x, y, use=use, distance=2, sibling=sibling)
    found = fit(nodes if warm == 0 else [], nodes if warm == 1 else [], 3)
    place = warm, use, 2, int(sibling)
    weight = PRIOR if use.like == use else 16.0
    expected = logistic(x, y, weight=weight)
    assert (float(found.slope[place]), float(found.offset[place])) == pytest.approx(expected, abs=1e-4)
    for like in [other for other in DraftUse if other.like == use]:
        same = warm, like, 2, int(sibling)
        assert (found.slope[same], found.offset[same]) == (found.slope[place], found.offset[place])
    for other in [use, *(other for other in DraftUse if other.like == use)]:
        found.slope[warm, other, 2, int(sibling)], found.offset[warm, other, 2, int(sibling)] = 1.0, 0.0
    assert torch.equal(found.slope, torch.ones_like(found.slope))
    assert torch.equal(found.offset, torch.zeros_like(found.offset))


def test_the_prior_of_a_use_is_the_fit_of_the_one_it_is_like() -> None:
    """A few observations that agree with it leave it; many of its own replace it."""
    usual, own = (drawn(0.0, 2.0, *line, 4000) for line in ((0.6, -1.0), (1.2, 1.0)))
    seen = judged(*usual, use=DraftUse.SECOND)
    few = fit([*seen, *judged(own[0][:1], own[1][:1], use=DraftUse.D2SD)], [], 1)
    many = fit([*seen, *judged(*own, use=DraftUse.D2SD)], [], 1)
    at = 0, DraftUse.D2SD, 0, 0
    assert (float(few.slope[at]), float(few.offset[at])) == pytest.approx((0.6, -1.0), abs=0.35)
    assert (float(many.slope[at]), float(many.offset[at])) == pytest.approx((1.2, 1.0), abs=0.15)
    assert float(many.slope[0, DraftUse.SECOND, 0, 0]) == float(few.slope[0, DraftUse.SECOND, 0, 0])


def test_a_few_observations_say_little() -> None:
    """Four that contradict a sure drafter move it; one moves it less; the prior holds both near the identity."""
    one, four = (logistic(torch.full((n,), 2.0).double(), torch.zeros(n).double()) for n in (1, 4))
    assert 0 < 1 - one[0] < 1 - four[0] < 0.95
    assert 0 > one[1] > four[1] > -0.8


def test_corrected_applies_the_groups_own_numbers() -> None:
    slope, offset = torch.ones(2, 6, 2, 2), torch.zeros(2, 6, 2, 2)
    slope[1, 0, 1, 1], offset[1, 0, 1, 1] = 0.5, -1.0
    own = Calibration(slope, offset)
    nodes = [said(math.log(0.8), distance=1, sibling=True), said(math.log(0.3), False)]
    assert [n.prob for n in calibrated(nodes, own, 0)] == pytest.approx([0.8, 0.3], abs=1e-5)
    warm = calibrated(nodes, own, 1)
    odds = 0.5 * math.log(0.8 / 0.2) - 1
    assert [n.prob for n in warm] == pytest.approx([1 / (1 + math.exp(-odds)), 0.3], abs=1e-5)
    assert [n._replace(logprob=0.0) for n in warm] == [n._replace(logprob=0.0) for n in nodes]


def test_error_of_by_hand() -> None:
    """Two bins: 0.95 said twice and right once, 0.25 said once and right; a certain one belongs to the last bin."""
    nodes = [said(math.log(0.95)), said(math.log(0.95), False), said(math.log(0.25))]
    assert error_of(nodes, DraftUse.FIRST) == pytest.approx((abs(1.9 - 1) + abs(0.25 - 1)) / 3)
    assert error_of([*nodes, said(0.0)], DraftUse.FIRST) == pytest.approx((abs(2.9 - 2) + abs(0.25 - 1)) / 4)
    assert error_of([*nodes, *[said(0.0, False, use=DraftUse.SECOND)] * 9], DraftUse.FIRST) == error_of(
        nodes, DraftUse.FIRST
    )
    assert error_of(nodes, DraftUse.SECOND) == 0


@pytest.mark.parametrize(("mean", "spread", "a", "b"), WORLDS)
def test_a_fit_improves_what_it_has_not_seen(mean: float, spread: float, a: float, b: float) -> None:
    nodes = judged(*drawn(mean, spread, a, b, 4000))
    random.Random(1).shuffle(nodes)
    seen, fresh = nodes[:2000], nodes[2000:]
    before, after = error_of(fresh, DraftUse.FIRST), error_of(calibrated(fresh, fit(seen, [], 1), 0), DraftUse.FIRST)
    assert before > 0.07
    assert after < min(0.05, before / 2)
