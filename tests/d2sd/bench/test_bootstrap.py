"""Intervals: the same every time, around the estimate, narrower with more prompts, and right about as often as told."""

from __future__ import annotations

import numpy as np
import pytest

from d2sd.bench.bootstrap import Interval, tau_interval, tau_ratio
from d2sd.bench.metrics import mean_tau
from d2sd.bench.result import Cell
from tests.d2sd.bench.helpers import cell


def drawn(count: int, seed: int, name: str = "gsm8k") -> Cell:
    """Prompts of one step with 1 to 8 tokens, all equally likely: the true τ is 4.5."""
    return cell("d2sd", *([int(n)] for n in np.random.default_rng(seed).integers(1, 9, count)), set=name)


def known(interval: Interval | None) -> Interval:
    assert interval is not None
    return interval


def test_the_same_cells_give_the_same_interval_around_the_estimate() -> None:
    one = drawn(20, 0)
    interval = known(tau_interval([one]))
    assert interval == tau_interval([one])
    assert interval.low < one.tau < interval.high


def test_percentiles_of_two_prompts() -> None:
    """Means of two draws from {1, 3} are 1, 2, 3 with probabilities 1/4, 1/2, 1/4."""
    assert tau_interval([cell("d2sd", [1], [3])]) == (1.0, 3.0)
    assert tau_interval([cell("d2sd", [2], [2, 2], [1, 3])]) == (2.0, 2.0), "prompts without difference"


def test_many_prompts_have_the_interval_of_the_normal_distribution() -> None:
    one = drawn(400, 3)
    interval, values = known(tau_interval([one])), [r.accepted[0] for r in one.requests]
    reach = 1.96 * float(np.std(values)) / 20
    assert interval == pytest.approx((one.tau - reach, one.tau + reach), abs=0.1 * reach)


def test_95_of_100_intervals_hold_the_truth() -> None:
    hits = sum(not known(tau_interval([drawn(40, seed)])).excludes(4.5) for seed in range(200))
    assert 0.89 <= hits / 200 <= 0.99


def test_sets_are_resampled_apart_and_weigh_the_same() -> None:
    """Prompts of one set do not differ, so the mean's width is half of the other's, however many they are."""
    still, moving = cell("d2sd", *[[4]] * 500, set="mbpp"), drawn(30, 2)
    alone, both = known(tau_interval([moving])), known(tau_interval([still, moving]))
    assert both.high - both.low == pytest.approx((alone.high - alone.low) / 2, rel=0.1)
    assert both.low < mean_tau([still, moving]) < both.high


def test_one_prompt_tells_no_interval_and_a_ratio_is_of_the_shared_ones() -> None:
    assert tau_interval([cell("d2sd", [4])]) is None
    assert tau_interval([drawn(9, 0), cell("d2sd", [4], set="mbpp")]) is None
    ratio = tau_ratio(cell("d2sd", [2]), cell("d2sd", [3]))
    assert ratio == (1.5, None, 1)
    renamed = cell("d2sd", requests=[{"id": "other", "accepted": [3], "tokens": 3}])
    assert tau_ratio(cell("d2sd", [2]), renamed) is None


def test_a_ratio_pairs_prompts_by_id_and_cancels_what_both_find_hard() -> None:
    old = cell("chain", *([n] for n in (1, 2, 3, 4, 5, 6)))
    new = cell("d2sd", *([2 * n] for n in (1, 2, 3, 4, 5, 6)))
    shuffled = new.model_copy(update={"requests": new.requests[::-1]})
    for other in (new, shuffled):
        ratio = tau_ratio(old, other)
        assert ratio is not None
        assert (ratio.value, ratio.prompts) == (2.0, 6)
        assert ratio.interval == pytest.approx((2.0, 2.0))


def test_a_ratio_is_of_the_shared_prompts_only() -> None:
    old, new = cell("d2sd", [1], [2], [9]), cell("d2sd", [2], [2])
    ratio = tau_ratio(old, new)
    assert ratio is not None
    assert (ratio.value, ratio.prompts) == (4 / 3, 2)
    assert known(ratio.interval) == (1.0, 2.0)  # of pairs (1, 2) and (2, 2)


def test_an_interval_that_ends_at_a_value_does_not_exclude_it() -> None:
    assert not Interval(1.0, 1.2).excludes(1)
    assert Interval(1.01, 1.2).excludes(1)
    assert Interval(0.8, 0.99).excludes(1)
