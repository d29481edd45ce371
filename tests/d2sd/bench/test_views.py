"""Order, selection and pooling."""

from __future__ import annotations

import pytest

from d2sd.bench import views
from d2sd.bench.result import Difference
from d2sd.viz.plot_style import Line
from tests.d2sd.bench.helpers import bins, cell, result


def test_lines_stand_in_the_order_of_methods_and_then_of_rows() -> None:
    made = result(
        cell("own", [1]),
        cell("hybrid", [1], rows=16),
        cell("d2sd", [1], rows=64),
        cell("d2sd", [1]),
        cell("off", [1]),
        cell("chain", [1]),
        cell("lookup", [1], temperature=1.0),
        cell("auto", [1], concurrency=4),
    )
    expected = [("off", 1), ("chain", 8), ("d2sd", 8), ("d2sd", 64), ("hybrid", 16), ("own", 8)]
    assert views.lines(made, 0.0, 1) == expected
    assert views.widest(made, 0.0, 1) == [line for line in expected if line != ("d2sd", 8)]
    assert views.temperatures(made) == [0.0, 1.0]
    assert views.concurrencies(made, 0.0) == [1, 4]
    assert views.concurrencies(made, 1.0) == [1]


def test_sets_stand_in_the_order_of_measurement() -> None:
    made = result(cell("off", [1], set="z"), cell("chain", [2], set="a"), cell("chain", [3], set="z"))
    assert views.sets(made) == ["z", "a"]
    assert list(views.cells_of(made, Line("chain", 8), 0.0, 1)) == ["z", "a"]
    assert list(views.cells_of(made, Line("off", 1), 0.0, 1)) == ["z"]


def test_pooling_adds_everything_up() -> None:
    late = Difference(request=0, token=3, gap=0.5, excused=False)
    a = cell(
        "d2sd",
        [1],
        [2],
        set="a",
        verified_rows=1,
        nodes=2,
        merged=3,
        rescued=4,
        steps=5,
        wall_seconds=6,
        boundary_rank={"0": 1},
        calibration={"first": bins(b1=(1, 0.1, 0))},
        policies={"off": 1},
        stage_seconds={"verify": 1.0},
    )
    b = cell(
        "d2sd",
        [3],
        set="b",
        verified_rows=10,
        nodes=20,
        merged=30,
        rescued=40,
        steps=50,
        wall_seconds=60,
        boundary_rank={"0": 1, "none": 5},
        policies={"off": 2, "d2sd": 1},
        differences=[late],
        calibration={"first": bins(b1=(2, 0.3, 1)), "second": bins(b9=(1, 1.0, 1))},
        stage_seconds={"verify": 2.0, "accept": 1.0},
    )
    both = views.pool([a, b])
    assert both.key == ("d2sd", 8, "all", 0.0, 1)
    assert [r.id for r in both.requests] == ["a/0", "a/1", "b/0"]
    assert both.tau == 2.0
    assert (both.verified_rows, both.nodes, both.merged, both.rescued) == (11, 22, 33, 44)
    assert (both.steps, both.wall_seconds) == (55, 66)
    assert both.boundary_rank == {"0": 2, "none": 5}
    assert both.policies == {"off": 3, "d2sd": 1}
    assert both.stage_seconds == {"verify": 3.0, "accept": 1.0}
    assert both.calibration["first"][1] == pytest.approx((3, 0.4, 1))
    assert both.calibration["second"][9] == (1, 1.0, 1)
    assert both.differences == [late.model_copy(update={"request": 2})]
    with pytest.raises(AssertionError):
        views.pool([a, cell("chain", [1])])


def test_plain_decoding_is_pooled_over_the_same_sets_or_not_at_all() -> None:
    plain = [cell("off", [1], set=name, wall_seconds=seconds) for name, seconds in (("a", 1), ("b", 10), ("c", 100))]
    chain = [cell("chain", [2], set=name) for name in ("a", "c")]
    _, of_both = views.pooled(result(*plain, *chain), Line("chain", 8), 0.0, 1)
    assert of_both is not None
    assert of_both.wall_seconds == 101
    assert views.pooled(result(*plain[:2], *chain), Line("chain", 8), 0.0, 1)[1] is None
