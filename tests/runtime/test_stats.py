from __future__ import annotations

from collections import Counter

import pytest

from d2sd.runtime.stats import Clock, SequenceStats, calibration_error, mean_tau, reliability_bins


def stats(*steps: tuple[int, int]) -> SequenceStats:
    """From (tokens of the step, origin of its path's end)."""
    made = SequenceStats()
    for accepted, accepted_branch in steps:
        made.record(accepted, accepted_branch, rows=7, policy="d2sd")
    return made


def test_counts_of_one_request() -> None:
    one = stats((1, 0), (4, 2), (2, 0), (1, 3))
    assert (one.steps, one.tokens, one.verified_nodes) == (4, 8, 28)
    assert one.tau == 2.0
    assert one.accepted_branches == Counter({2: 1, 0: 1})  # steps without an accepted draft have no winner
    assert one.joint_acceptance() == [2 / 4, 1 / 4, 1 / 4]


def test_nothing_done_yet() -> None:
    none = SequenceStats()
    assert none.tau == 0.0
    assert none.joint_acceptance() == []
    assert mean_tau([]) == 0.0
    assert SequenceStats.merged([]).tau == 0.0


def test_merged_weighs_steps_and_the_mean_weighs_requests() -> None:
    short, long = stats((4, 1)), stats((1, 0), (1, 0), (2, 1))
    merged = SequenceStats.merged([short, long])
    assert merged.tau == 8 / 4
    assert mean_tau([short, long]) == pytest.approx((4 + 4 / 3) / 2)
    assert merged.accepted == Counter({4: 1, 1: 2, 2: 1})
    assert merged.accepted_branches == Counter({1: 2})
    assert merged.verified_nodes == 28
    assert short.tokens == 4  # what was merged stays as it was


def test_merged_preemptions_and_requests_without_a_step() -> None:
    waited, ran = SequenceStats(preemptions=2), stats((3, 1))
    assert SequenceStats.merged([waited, ran]).preemptions == 2
    assert mean_tau([waited, ran]) == 3.0


def test_clock_adds_up_and_counts_a_stage_that_fails() -> None:
    clock = Clock()
    for _ in range(2):
        with clock.stage("verify"):
            pass
    once = clock.seconds["verify"]
    with pytest.raises(ValueError, match="x"), clock.stage("verify"):
        raise ValueError("x")
    assert clock.seconds["verify"] > once > 0


def test_conditional_acceptance_is_given_the_positions_before() -> None:
    one = SequenceStats()
    for length in (1, 4, 2, 1):
        one.record(length, 0, 8, "chain")
    assert one.conditional_acceptance() == [1 / 2, 1 / 2, 1.0]


def test_calibration_error_by_hand() -> None:
    """Two bins: 0.95 predicted twice and accepted once, 0.25 once and accepted; 1.0 belongs to the last bin."""
    outcomes = [(0.95, True), (0.95, False), (0.25, True)]
    bins = reliability_bins(outcomes)
    assert [n for n, _, _ in bins] == [0, 0, 1, 0, 0, 0, 0, 0, 0, 2]
    assert calibration_error(bins) == pytest.approx((abs(1.9 - 1) + abs(0.25 - 1)) / 3)
    assert calibration_error(reliability_bins([*outcomes, (1.0, True)])) == pytest.approx((0.9 + 0.75) / 4)
    assert calibration_error(reliability_bins([])) is None
