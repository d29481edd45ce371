"""Commands that describe and do not run import neither PyTorch nor transformers, which take seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))
SLOW = {"torch", "transformers"}
_PROGRAM = """
import sys
from d2sd.cli.main import main
try:
    main(prog_name="d2sd")
finally:
    print("\\0", *sys.modules)
"""
pytestmark = pytest.mark.subprocess


def imported(*arguments: object, told: str = "", code: int = 0) -> set[str]:
    """The modules that a process has imported when a command is done, which ends with `code` and says `told`.

    Not timed, for that depends on the machine: what takes the time is not imported.
    """
    command = [sys.executable, "-c", _PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    text, _, modules = done.stdout.rpartition("\0")
    assert told in text + done.stderr
    return set(modules.split())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_plan_of_every_shipped_recipe(recipe: Path) -> None:
    assert not imported("build", recipe, "--plan", told="bundle  ") & SLOW


def test_a_plan_reads_headers_of_weights_and_imports_neither_engines_nor_training(recipe: Path) -> None:
    found = imported("build", recipe, "--plan", told="parameters")
    assert not found & SLOW
    for package in ("train", "bench", "serve", "build.pipeline", "build.validate", "bundle.load", "runtime.engine"):
        assert f"d2sd.{package}" not in found


def test_inspect_of_a_bundle(built: Path) -> None:
    assert not imported("inspect", built, told="built by") & (SLOW | {"numpy", "safetensors", "matplotlib"})


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_is_instant(flag: str) -> None:
    assert not imported(flag) & (SLOW | {"numpy", "safetensors", "matplotlib", "rich", "pydantic", "yaml"})


@pytest.mark.parametrize("command", ["inspect", "build", "data", "serve", "triton", "worker"])
def test_help_of_a_command(command: str) -> None:
    assert not imported(command, "--help") & SLOW


@pytest.mark.parametrize("change", ["tree.block_size=-1", "nothing=1", "limits.page_size=0"])
def test_a_wrong_recipe_is_an_error_of_the_recipe(recipe: Path, change: str) -> None:
    assert not imported("build", recipe, "--plan", "--set", change, told=change.partition("=")[0], code=2) & SLOW
