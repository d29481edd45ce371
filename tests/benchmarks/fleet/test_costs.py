"""Accepted lengths as distributions, and the cost model of a worker."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.fleet.accepted import DRAWS, capped_geometric, lengths_by_draw, mean_length, shares
from benchmarks.fleet.costs import EngineCosts, PolicyCosts, StepCosts, WorkerModel, load_costs, save_costs
from d2sd.errors import D2SDError
from tests.benchmarks.fleet.helpers import PLAIN, engine_costs


@pytest.mark.parametrize("mean", [1.0, 2.5, 3.99, 8.0])
def test_capped_geometric_has_the_mean_and_one_acceptance_rate(mean: float) -> None:
    found = capped_geometric(mean, 8)
    assert sum(found) == pytest.approx(1)
    assert mean_length(found) == pytest.approx(mean, abs=1e-6)
    beyond = [sum(found[k:]) for k in range(8)]  # P(length > k)
    if 1 < mean < 8:
        rates = [after / before for before, after in pairwise(beyond)]
        assert rates == pytest.approx([rates[0]] * 7)


def test_draws_follow_the_distribution() -> None:
    distribution = [0.5, 0.0, 0.25, 0.25]
    drawn = lengths_by_draw(distribution)
    assert shares(drawn, 4) == pytest.approx(distribution, abs=1 / DRAWS)
    assert set(lengths_by_draw(PLAIN)) == {1}


def test_a_step_costs_its_bucket_and_its_context() -> None:
    policy = PolicyCosts(seconds={1: (1.0, 0.1), 4: (2.0, 0.2)}, accepted=[PLAIN])
    costs = EngineCosts(
        served={1: "tree", 4: "tree"}, policies={"tree": policy}, prefill=[(8, 1.0), (16, 3.0)], prefill_context=0.01
    )
    model = WorkerModel(costs)
    assert model.decode_seconds(1, 10) == pytest.approx(1.0 + 0.1 * 10)
    assert model.decode_seconds(3, 30) == pytest.approx(2.0 + 0.2 * 10)
    assert [model.prefill_seconds(rows, 0) for rows in (8, 12, 16, 32)] == pytest.approx([1.0, 2.0, 3.0, 6.0])
    assert model.prefill_seconds(8, 5) == pytest.approx(1.0 + 0.01 * 8 * 5)


def test_costs_are_read_back_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs = StepCosts(kind="measured", source="here", engines={"off": engine_costs()})
    save_costs(path, costs)
    assert load_costs(path) == costs
    path.write_text(path.read_text().replace('"8": "one"', '"8": "two"'))
    with pytest.raises(
        D2SDError, match=r"(?s)costs\.json: engines\.off.*two is served at a batch of 8 and has no costs"
    ):
        load_costs(path)
