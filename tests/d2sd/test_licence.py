"""Licences that a checkpoint's folder states, and those that are printed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from d2sd.licence import NOT_STATED, read_licence, warning
from d2sd.recipe import load_recipe
from tests.commands import succeeds
from tests.convert.helpers import write_project

CARDS = {
    "a name": ("---\nlicense: apache-2.0\ntags: [a]\n---\n# Card\n", "apache-2.0"),
    "its own name": ("---\nlicense: other\nlicense_name: nvidia-evaluation\n---\n", "nvidia-evaluation"),
    "a name and its own": ("---\nlicense: mit\nlicense_name: x\n---\n", "mit"),
    "several": ("---\nlicense: [mit, cc-by-nc-4.0]\n---\n", "mit, cc-by-nc-4.0"),
    "no front matter": ("# Card\n\nlicense: mit\n", NOT_STATED),
    "none": ("---\ntags: [a]\n---\n", NOT_STATED),
    "no YAML": ("---\nlicense: [\n---\n", NOT_STATED),
    "a number": ("---\nlicense: 4\n---\n", NOT_STATED),
    "no mapping": ("---\n- license\n---\n", NOT_STATED),
}


@pytest.mark.parametrize(("card", "licence"), CARDS.values(), ids=CARDS)
def test_a_model_card_names_it(tmp_path: Path, card: str, licence: str) -> None:
    (tmp_path / "README.md").write_text(card)
    assert read_licence(tmp_path) == licence


@pytest.mark.parametrize("card", ["---" + "\n" * 500_000, "---\n" + "\n---  " * 100_000, "---" + " \n" * 250_000])
def test_no_model_card_takes_long(tmp_path: Path, card: str) -> None:
    (tmp_path / "README.md").write_text(card)
    begun = time.process_time()
    assert read_licence(tmp_path) == NOT_STATED
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-flex", "smollm2-135m-fp8"])
def test_the_embedded_default_states_all_licences(name: str) -> None:
    recipe = load_recipe(Path("recipes") / f"{name}.yaml")
    models = [recipe.target, *recipe.drafters.sources.values()]
    assert [source.licence for source in models] == ["Apache-2.0"] * len(models)


def test_a_file_names_it_where_no_card_does(tmp_path: Path) -> None:
    assert read_licence(tmp_path) == read_licence(tmp_path / "missing") == NOT_STATED
    (tmp_path / "README.md").write_bytes(b"\xff\xfe")
    (tmp_path / "LICENSE.txt").write_text("\n  # NVIDIA Non-Commercial License\n\nterms\n")
    assert read_licence(tmp_path) == "NVIDIA Non-Commercial License (LICENSE.txt)"
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert read_licence(tmp_path) == "mit"


@pytest.mark.parametrize(
    ("licence", "told"),
    [
        ("cc-by-nc-nd-4.0", True),
        ("CC BY-NC-SA 4.0", True),
        ("nvidia-evaluation", True),
        ("MiniMax non-commercial", True),
        ("Noncommercial", True),
        ("apache-2.0", False),
        ("llama3.1", False),
        ("nvidia-open-model-license", False),
        (NOT_STATED, False),
    ],
)
def test_which_are_told_aloud(licence: str, told: bool) -> None:
    assert (warning("target", licence) is not None) == told


@pytest.mark.slow
def test_plan_build_and_inspect_say_it(tmp_path: Path) -> None:
    recipe = write_project(tmp_path / "project")
    (recipe.parent / "target" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (recipe.parent / "first" / "README.md").write_text("---\nlicense: cc-by-nc-nd-4.0\n---\n")
    said = "drafter_first: its licence, cc-by-nc-nd-4.0, does not allow commercial use"
    plan = succeeds("build", recipe, "--plan")
    assert said in plan.stdout
    assert f"licence: {NOT_STATED}" in plan.stdout
    out = tmp_path / "out"
    built = succeeds("build", recipe, "--out", out, "--set", "checks.count=1")
    assert said in built.stderr.splitlines()
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["target"]["licence"] == "apache-2.0"
    assert [manifest["drafters"][name]["licence"] for name in ("first", "second")] == ["cc-by-nc-nd-4.0", NOT_STATED]
    assert said in succeeds("inspect", out).stdout
