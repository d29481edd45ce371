"""The capacity sheet: GPUs for a load, from a recipe or a bundle, and targets that cannot be met."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from d2sd.bench.capacity import Demand, Slo, most_sustained, operation, read_plan
from d2sd.bench.roofline import StepCost
from d2sd.build.plan import GPUS
from d2sd.cli.main import main
from d2sd.runtime.speculation.policy import Policy
from d2sd.runtime.step_times import StepTimes
from tests.convert.helpers import add_calibration, write_project
from tests.d2sd.serve.conftest import build_tiny

LOAD = {"--gpu": "H100", "--rate": 2000, "--prompt-tokens": 20, "--output-tokens": 8, "--ttft": 0.02, "--itl": 0.01}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_project(tmp_path_factory.mktemp("capacity") / "project")
    add_calibration(path)
    return path


def capacity(source: Path, **changed: object) -> Result:
    options = LOAD | {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    flat = [str(part) for pair in options.items() for part in pair]
    return CliRunner().invoke(main, ["capacity", str(source), *flat], catch_exceptions=False)


def test_a_sheet_says_what_it_is_and_is_written(recipe: Path, tmp_path: Path) -> None:
    found = capacity(recipe, out=tmp_path / "sheet.json")
    assert found.exit_code == 0, found.output
    assert "arithmetic; nothing was measured" in found.output
    assert "A step is assumed to reach 0.7 of them (`--efficiency`)." in found.output
    given = capacity(recipe, efficiency=0.8)
    assert "A step is assumed to reach 0.8 of them" in given.output
    sheet = json.loads((tmp_path / "sheet.json").read_text())
    assert sheet["label"] == "arithmetic, not measured"
    assert [one["policy"] for one in sheet["options"]] == ["off", "auto"]
    for one in sheet["options"]:
        full = one["sustained"]
        assert one["gpus"] * one["most_rate"] >= 2000 > (one["gpus"] - 1) * one["most_rate"]
        assert one["most_rate"] == pytest.approx(0.8 * full["rate"])
        assert full["ttft"] <= 0.02
        assert full["itl"] <= 0.01
        assert full["batch"] * one["request_pages"] <= one["pages"]
    plain, auto = sheet["options"]
    assert auto["weight_bytes"] > plain["weight_bytes"]


def test_a_sheet_says_which_steps_a_gpu_measured(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(policies: Sequence[Policy], sizes: Sequence[int]) -> StepTimes:
        return StepTimes.of({(policy, size): 2e-4 for policy in policies for size in sizes})

    monkeypatch.setattr("d2sd.bench.capacity_sheet.steps", lambda plan, gpu: find)
    monkeypatch.setattr(
        "d2sd.bench.capacity_sheet.shares", lambda gpu: {("FP8 weights", 8): 0.61, ("FP8 weights", 16): 0.7}
    )
    found = capacity(recipe, out=tmp_path / "sheet.json")
    assert "step times of off and auto were measured here" in found.output
    assert "on a GPU of yours FP8 weights reached 0.61 to 0.70, by rows" in found.output
    sheet = json.loads((tmp_path / "sheet.json").read_text())
    assert sheet["label"] == "arithmetic over measured step times"
    assert [one["measured"] for one in sheet["options"]] == [True, True]
    given = capacity(recipe, efficiency=0.8)
    assert "nothing was measured" in given.output, "a given share is a question about it alone"


def test_a_gpu_serves_a_prefill_and_its_steps_for_each_request() -> None:
    """Two chunks of 0.1 s, and ten steps of 0.05 s for twenty tokens."""
    demand = Demand(rate=1, prompt_tokens=100, output_tokens=20, targets=Slo(ttft=1, itl=0.1))
    cost, chunks = StepCost("chain", 0.05, 2.0), [0.1, 0.1]
    alone, four = (operation(cost, chunks, demand, batch) for batch in (1, 4))
    assert (alone.rate, alone.ttft, alone.itl) == pytest.approx((1 / 0.7, 0.25, 0.025))
    assert (four.rate, four.ttft, four.itl) == pytest.approx((4 / 1.3, 0.35, 0.025 + 3 * 0.2 / 20))
    costs = dict.fromkeys((1, 2, 3, 4, 6, 8, 12, 16), cost)
    assert most_sustained(costs, chunks, demand, 16).batch == 8  # nine together miss the ITL
    assert most_sustained(costs, chunks, demand, 3).batch == 3  # no more fit


def test_more_load_takes_more_gpus(recipe: Path, tmp_path: Path) -> None:
    counts = []
    for rate in (500, 20_000):
        assert capacity(recipe, rate=rate, policy="off", out=tmp_path / "sheet.json").exit_code == 0
        counts.append(json.loads((tmp_path / "sheet.json").read_text())["options"][0]["gpus"])
    assert counts[0] < counts[1]


@pytest.mark.slow
def test_a_bundle_has_the_plan_of_its_recipe(tmp_path: Path) -> None:
    bundle = build_tiny(tmp_path)
    built, planned = read_plan(bundle), read_plan(tmp_path / "project" / "recipe.yaml")
    for one, other in zip(built.parts, planned.parts, strict=True):
        assert (one.config, one.weight_bytes, one.kv_token_bytes) == (
            other.config,
            other.weight_bytes,
            other.kv_token_bytes,
        )
    assert built.recipe.limits == planned.recipe.limits


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ttft": 1e-6}, "one request alone on a GPU misses the TTFT"),
        ({"itl": 1e-6}, "one request alone on a GPU misses the ITL"),
        ({"prompt_tokens": 60}, "maximum context length"),
        ({"out": "sheet.txt"}, "a name in .md or .json"),
        ({"tau": 9.0}, "out of range"),
        ({"rate": "nan"}, "nan is not a number"),
        ({"rate": "inf"}, "not in the range"),
        ({"itl": "inf"}, "not in the range"),
        ({"efficiency": "nan"}, "nan is not a number"),
        ({"prompt_tokens": 10**9}, "not in the range"),
        ({"max_batch": 10**30}, "not in the range"),
    ],
)
def test_what_cannot_be_met_names_the_bound(recipe: Path, changed: dict[str, object], message: str) -> None:
    found = capacity(recipe, **changed)
    assert found.exit_code == 2
    assert message in found.output


def test_a_model_too_large_for_the_gpu_is_refused(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GPUS, "H100", 40_000)
    found = capacity(recipe)
    assert found.exit_code == 2
    assert "does not fit on one H100" in found.output
