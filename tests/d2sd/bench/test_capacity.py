"""The capacity sheet: the memory of a recipe or a bundle, its measured steps, and requests that do not fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from d2sd.bench.capacity import read_plan
from d2sd.bench.measured import StepFiles
from d2sd.build.plan import GPUS
from d2sd.cli.main import main
from d2sd.runtime.speculation.policy import Policy
from d2sd.runtime.step_times import StepTimes
from tests.commands import passed, refused
from tests.convert.helpers import add_calibration, write_project
from tests.d2sd.serve.conftest import build_tiny

LOAD = {"--gpu": "H100", "--prompt-tokens": 20, "--output-tokens": 8}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_project(tmp_path_factory.mktemp("capacity") / "project")
    add_calibration(path)
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 0.2 ms, for every policy and batch."""

    def find(self: StepFiles, policies: Sequence[Policy], sizes: Sequence[int]) -> StepTimes:
        return StepTimes.of({(policy, size): 2e-4 for policy in policies for size in sizes})

    monkeypatch.setattr(StepFiles, "find", find)


def capacity(source: Path, **changed: object) -> Result:
    options = LOAD | {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    flat = [str(part) for pair in options.items() for part in pair]
    return CliRunner().invoke(main, ["capacity", str(source), *flat], catch_exceptions=False)


def test_without_measured_steps_a_sheet_has_memory_and_says_how_to_measure(recipe: Path, tmp_path: Path) -> None:
    found = passed(capacity(recipe, out=tmp_path / "sheet.json", tensor_parallel=2))
    assert f"d2sd generate {recipe} --policy auto --device cuda -p Hello --tensor-parallel 2\n" in found.output
    assert "Nothing is known of its speed" in found.output
    assert "ITL" not in found.output
    sheet = json.loads((tmp_path / "sheet.json").read_text())
    plain, auto = sheet["options"]
    assert [one["policy"] for one in (plain, auto)] == ["off", "auto"]
    assert [one["steps"] for one in (plain, auto)] == [[], []]
    assert auto["weight_bytes"] > plain["weight_bytes"]
    for one in (plain, auto):
        assert 1 <= one["request_pages"] <= one["pages"]
    assert capacity(recipe, policy="d2sd", out=tmp_path / "sheet.md").exit_code == 0, "no calibration of it is needed"
    assert "requests that they hold" in (tmp_path / "sheet.md").read_text()


def test_measured_steps_are_shown_by_batch(recipe: Path, tmp_path: Path, measured: None) -> None:
    found = passed(capacity(recipe, policy="chain", tau=2, max_batch=4, out=tmp_path / "sheet.json"))
    plain, chain = json.loads((tmp_path / "sheet.json").read_text())["options"]
    assert [(step["batch"], step["seconds"], step["tokens"]) for step in plain["steps"]] == [
        (batch, 2e-4, 1) for batch in (1, 2, 3, 4)
    ]
    assert [step["tokens"] for step in chain["steps"]] == [2, 2, 2, 2]
    (row,) = (line for line in found.output.splitlines() if line.startswith("| 4 ") and "chain" in line)
    assert [cell.strip() for cell in row.split("|")][3:-1] == ["0.20", "2.00", "0.10", "40000"]
    assert "Prefill and queueing are not in these" in found.output
    assert "Nothing is known" not in found.output


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
        ({"prompt_tokens": 60}, "maximum context length"),
        ({"out": "sheet.txt"}, "a name in .md or .json"),
        ({"tau": 9.0}, "out of range"),
        ({"tau": "nan"}, "out of range"),
        ({"step_times": "absent.json"}, "no step times of this bundle on such a GPU"),
        ({"prompt_tokens": 10**9}, "not in the range"),
        ({"max_batch": 10**30}, "not in the range"),
    ],
)
def test_bad_input_is_named(recipe: Path, changed: dict[str, object], message: str) -> None:
    refused(capacity(recipe, **changed), message)


def test_a_model_too_large_for_the_gpu_is_refused(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GPUS, "H100", 40_000)
    refused(capacity(recipe), "does not fit on one H100")
