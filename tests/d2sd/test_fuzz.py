"""A few hundred damaged recipes through `d2sd build --plan`; benchmarks/fuzz_inputs.py runs thousands."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from benchmarks import fuzz_inputs

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_recipe_is_a_plan_or_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The target's wheel is not in the cache, so a sound recipe is planned in milliseconds."""
    monkeypatch.setenv("D2SD_CACHE", str(tmp_path / "cache"))
    for folder in ("recipes", "models"):
        (tmp_path / folder).mkdir()
    (tmp_path / "models" / "smollm2-135m").symlink_to(ROOT / "models" / "smollm2-135m")
    recipe = tmp_path / "recipes" / "recipe.yaml"
    recipe.write_bytes((ROOT / "recipes" / "smollm2-135m.yaml").read_bytes())
    assert fuzz_inputs.fault_of("build", str(recipe), "--plan") is None
    assert [fault for fault in islice(fuzz_inputs.recipes(recipe, random.Random(seed)), 80) if fault] == []


def test_a_fault_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr("d2sd.cli.build.load_recipe", broken)
    assert (fuzz_inputs.fault_of("build", "x.yaml", "--plan") or "").startswith("TypeError: a bug File ")
