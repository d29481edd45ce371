"""Every metric on examples small enough to count by hand."""

from __future__ import annotations

import pytest

from d2sd.bench import metrics
from d2sd.runtime.stats import calibration_error
from tests.d2sd.bench.helpers import bins, cell

#: Two responses: 8 tokens in 4 steps (tau 2) and 4 tokens in 1 step (tau 4).
TWO = cell("d2sd", [1, 4, 2, 1], [4], verified_rows=60, nodes=40, merged=15, rescued=2, steps=4)
RANKED = cell("d2sd", [1], boundary_rank={"none": 2, "10": 1, "2": 1, "0": 4})
#: An answer that ends before what was committed, and plain decoding without time or tokens.
CUT = cell("d2sd", requests=[{"id": "0", "accepted": [8, 8], "tokens": 10}], wall_seconds=2)
NONE = cell("off", requests=[{"id": "0", "accepted": [1], "tokens": 0}])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([r.stats.tau for r in TWO.requests], [2.0, 4.0]),
        (TWO.tau, 3.0),  # weighs responses
        (metrics.tau_by_token(TWO), 12 / 5),  # weighs steps
        (metrics.mean_tau([TWO, cell("d2sd", [1], [1], [1], set="mbpp")]), 2.0),  # weighs sets
        ((metrics.request_steps(TWO), metrics.committed(TWO)), (5, 12)),
        (metrics.rows_per_step(TWO), 12.0),
        (metrics.rows_per_token(TWO), 5.0),
        (metrics.mean_nodes(TWO), 8.0),
        (metrics.merged_per_step(TWO), 3.0),
        (metrics.rescued_share(TWO), 0.4),
        (list(metrics.boundary_ranks(RANKED).items()), [("0", 0.5), ("2", 0.125), ("10", 0.125), ("none", 0.25)]),
        (metrics.boundary_ranks(cell()), {}),
        (metrics.boundary_ranks(cell("d2sd", [1], boundary_rank={"0": 0})), {}),
        (metrics.served(cell("auto", [1], policies={"off": 3, "hybrid": 1})), {"hybrid": 0.25, "off": 0.75}),
        (metrics.served(cell()), {}),
        ((metrics.tokens_per_second(CUT), CUT.tau), (5.0, 8.0)),  # the answer's alone, and all that was committed
        ((metrics.cycle_cost(cell(), NONE), metrics.speedup(cell(), NONE)), (None, None)),
        (calibration_error(bins(b9=(10, 9.0, 9))), 0.0),
        ((calibration_error(bins()), calibration_error([])), (None, None)),
    ],
)
def test_counted_by_hand(found: object, expected: object) -> None:
    assert found == expected


def test_acceptance_by_position() -> None:
    # drafts accepted by step: 0 3 1 0 | 3
    assert TWO.joint_acceptance == [3 / 5, 2 / 5, 2 / 5]
    assert TWO.conditional_acceptance == pytest.approx([3 / 5, 2 / 3, 1.0])
    nothing = cell("off", [1, 1])
    assert nothing.joint_acceptance == []
    assert nothing.conditional_acceptance == []


def test_costs_leave_prefill_out_and_speed_does_not() -> None:
    plain = cell("off", [1] * 10, steps=10, stage_seconds={"verify": 0.9, "retire": 0.1, "prefill": 5}, wall_seconds=2)
    tree = cell("d2sd", [4, 4, 2], steps=4, stage_seconds={"verify": 0.8, "prefill": 5, "commit": 0.2}, wall_seconds=1)
    assert metrics.step_seconds(plain) == pytest.approx(0.1)
    assert metrics.step_seconds(tree) == pytest.approx(0.25)
    assert metrics.cycle_cost(tree, plain) == pytest.approx(2.5)
    assert metrics.cycle_cost(plain, plain) == 1.0
    assert (metrics.tokens_per_second(plain), metrics.tokens_per_second(tree)) == (5.0, 10.0)
    assert metrics.speedup(tree, plain) == 2.0


@pytest.mark.parametrize("other", [{"set": "mbpp"}, {"temperature": 1.0}, {"concurrency": 2}])
def test_plain_decoding_of_other_work_is_refused(other: dict[str, object]) -> None:
    for metric in (metrics.cycle_cost, metrics.speedup):
        with pytest.raises(AssertionError):
            metric(cell(), cell("off", [1], **other))


def test_calibration_error() -> None:
    # 3 tokens, mean prediction 0.9 and 2 right: |2.7 - 2| = 0.7; 1 token, predicted 0.25 and right: 0.75
    assert calibration_error(bins(b2=(1, 0.25, 1), b9=(3, 2.7, 2))) == pytest.approx((0.7 + 0.75) / 4)
