"""Commands that describe and do not run need no PyTorch: an import of it, or of transformers, is refused here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from d2sd.build.pipeline import build
from d2sd.recipe import load_recipe
from tests.convert.helpers import write_project

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))
_REFUSING = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is imported")

refuse = sys.argv.pop(1) == "refuse"
if refuse:
    sys.meta_path.insert(0, Refuse())
from d2sd.cli.main import main

try:
    main(prog_name="d2sd")
finally:
    assert not refuse or not {"torch", "transformers"} & sys.modules.keys()
"""
pytestmark = pytest.mark.subprocess


def ran(*arguments: str, refuse: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _REFUSING, "refuse" if refuse else "allow", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_plan_of_every_shipped_recipe(recipe: Path) -> None:
    alone = ran("build", str(recipe), "--plan")
    assert alone.returncode == 0, alone.stderr
    assert "parameters" in alone.stdout or "fetch" in alone.stdout


@pytest.mark.parametrize("recipe", RECIPES[::5], ids=lambda path: path.stem)
def test_the_plan_is_the_same_where_torch_may_be_imported(recipe: Path) -> None:
    alone, beside = (ran("build", str(recipe), "--plan", refuse=refuse) for refuse in (True, False))
    assert (alone.stdout, alone.stderr) == (beside.stdout, beside.stderr)


def test_a_plan_reads_headers_of_weights(tmp_path: Path) -> None:
    recipe = write_project(tmp_path)
    done = ran("build", str(recipe), "--plan")
    assert done.returncode == 0, done.stderr
    assert "has no weights" not in done.stdout


def test_inspect_of_a_bundle(tmp_path: Path) -> None:
    recipe = load_recipe(write_project(tmp_path / "project"), ["checks.count=1"])
    build(recipe, tmp_path / "bundle", validate=False)
    done = ran("inspect", str(tmp_path / "bundle"))
    assert done.returncode == 0, done.stderr
    assert "built by" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["inspect", "--help"],
        ["build", "--help"],
        ["data", "--help"],
        ["serve", "--help"],
        ["triton", "--help"],
        ["worker", "--help"],
    ],
    ids=" ".join,
)
def test_help(arguments: list[str]) -> None:
    done = ran(*arguments)
    assert done.returncode == 0, done.stderr


def test_a_wrong_recipe_is_an_error_of_the_recipe(tmp_path: Path) -> None:
    recipe = write_project(tmp_path)
    for change, key in (
        ("tree.block_size=-1", "block_size"),
        ("nothing=1", "nothing"),
        ("limits.page_size=0", "page_size"),
    ):
        done = ran("build", str(recipe), "--plan", "--set", change)
        assert (done.returncode, key in done.stderr) == (2, True), done.stderr
    done = ran("build", str(tmp_path / "missing.yaml"), "--plan")
    assert done.returncode == 2, done.stderr
