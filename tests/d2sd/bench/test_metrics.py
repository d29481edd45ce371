"""Every metric on examples small enough to count by hand."""

from __future__ import annotations

import pytest

from d2sd.bench import metrics
from d2sd.runtime.stats import calibration_error
from tests.d2sd.bench.helpers import bins, cell

#: Two responses: 8 tokens in 4 steps (tau 2) and 4 tokens in 1 step (tau 4).
TWO = cell("d2sd", [1, 4, 2, 1], [4], verified_rows=60, nodes=40, merged=15, rescued=2, steps=4)


def test_tau_weighs_responses_and_tau_by_token_weighs_steps() -> None:
    assert [r.stats.tau for r in TWO.requests] == [2.0, 4.0]
    assert TWO.tau == 3.0
    assert metrics.tau_by_token(TWO) == 12 / 5
    assert (metrics.request_steps(TWO), metrics.committed(TWO)) == (5, 12)


def test_the_mean_over_sets_weighs_sets() -> None:
    other = cell("d2sd", [1], [1], [1], set="mbpp")
    assert metrics.mean_tau([TWO, other]) == 2.0


def test_acceptance_by_position() -> None:
    # drafts accepted by step: 0 3 1 0 | 3
    assert TWO.joint_acceptance == [3 / 5, 2 / 5, 2 / 5]
    assert TWO.conditional_acceptance == pytest.approx([3 / 5, 2 / 3, 1.0])
    nothing = cell("off", [1, 1])
    assert nothing.joint_acceptance == []
    assert nothing.conditional_acceptance == []


def test_work_of_a_step() -> None:
    assert metrics.rows_per_step(TWO) == 12.0
    assert metrics.rows_per_token(TWO) == 5.0
    assert metrics.mean_nodes(TWO) == 8.0
    assert metrics.merged_per_step(TWO) == 3.0
    assert metrics.rescued_share(TWO) == 0.4


def test_boundary_ranks_are_shares_in_the_order_of_ranks() -> None:
    ranked = cell("d2sd", [1], boundary_rank={"none": 2, "10": 1, "2": 1, "0": 4})
    assert list(metrics.boundary_ranks(ranked).items()) == [("0", 0.5), ("2", 0.125), ("10", 0.125), ("none", 0.25)]
    assert metrics.boundary_ranks(cell()) == {}
    assert metrics.boundary_ranks(cell("d2sd", [1], boundary_rank={"0": 0})) == {}


def test_policies_served_are_shares() -> None:
    assert metrics.served(cell("auto", [1], policies={"off": 3, "hybrid": 1})) == {"hybrid": 0.25, "off": 0.75}
    assert metrics.served(cell()) == {}


def test_costs_leave_prefill_out_and_speed_does_not() -> None:
    plain = cell("off", [1] * 10, steps=10, stage_seconds={"verify": 0.9, "retire": 0.1, "prefill": 5}, wall_seconds=2)
    tree = cell("d2sd", [4, 4, 2], steps=4, stage_seconds={"verify": 0.8, "prefill": 5, "commit": 0.2}, wall_seconds=1)
    assert metrics.step_seconds(plain) == pytest.approx(0.1)
    assert metrics.step_seconds(tree) == pytest.approx(0.25)
    assert metrics.cycle_cost(tree, plain) == pytest.approx(2.5)
    assert metrics.cycle_cost(plain, plain) == 1.0
    assert (metrics.tokens_per_second(plain), metrics.tokens_per_second(tree)) == (5.0, 10.0)
    assert metrics.speedup(tree, plain) == 2.0


def test_speed_counts_the_answer_and_not_what_was_committed_past_its_end() -> None:
    cut = cell("d2sd", requests=[{"id": "0", "accepted": [8, 8], "tokens": 10}], wall_seconds=2)
    assert metrics.tokens_per_second(cut) == 5.0
    assert cut.tau == 8.0


def test_plain_decoding_without_time_or_tokens_is_no_unit() -> None:
    none = cell("off", requests=[{"id": "0", "accepted": [1], "tokens": 0}])
    assert metrics.cycle_cost(cell(), none) is None
    assert metrics.speedup(cell(), none) is None


@pytest.mark.parametrize("other", [{"set": "mbpp"}, {"temperature": 1.0}, {"concurrency": 2}])
def test_plain_decoding_of_other_work_is_refused(other: dict[str, object]) -> None:
    for metric in (metrics.cycle_cost, metrics.speedup):
        with pytest.raises(AssertionError):
            metric(cell(), cell("off", [1], **other))


def test_calibration_error() -> None:
    # 3 tokens, mean prediction 0.9 and 2 right: |2.7 - 2| = 0.7; 1 token, predicted 0.25 and right: 0.75
    assert calibration_error(bins(b2=(1, 0.25, 1), b9=(3, 2.7, 2))) == pytest.approx((0.7 + 0.75) / 4)
    assert calibration_error(bins(b9=(10, 9.0, 9))) == 0.0
    assert calibration_error(bins()) is None
    assert calibration_error([]) is None
