"""Recipes in the package by name, where their drafters are, and that nothing they name is outside the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from d2sd.build.sources import located, sources_of
from d2sd.errors import RecipeError
from d2sd.prompt_sets import prompt_sets
from d2sd.recipe import load_recipe
from d2sd.shipped import find_recipe, shipped_names
from d2sd.train_recipe import load_train_recipe

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["", "train"])
def test_every_recipe_is_addressed_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    names = shipped_names(kind)
    assert names == sorted(path.stem for path in (ROOT / "recipes" / kind).glob("*.yaml"))
    for name in names:
        file, folder = find_recipe(Path(name), kind)
        assert file.resolve() == ROOT / "recipes" / kind / f"{name}.yaml"
        assert folder == Path("recipes") / kind


def test_paths_of_a_named_recipe_start_where_a_checkouts_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, training = load_recipe(Path("qwen3-8b")), load_train_recipe(Path("qwen3-8b"))
    assert recipe.path(recipe.target.path or "") == Path("checkpoints/Qwen3-8B")
    assert training.path(training.target.path or "") == Path("checkpoints/Qwen3-8B")
    (tmp_path / "recipes" / "train").mkdir(parents=True)
    (tmp_path / "checkpoints" / "Qwen3-8B").mkdir(parents=True)
    assert recipe.path(recipe.target.path or "").samefile("checkpoints/Qwen3-8B")
    assert training.path(training.target.path or "").samefile("checkpoints/Qwen3-8B")


def test_a_file_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()  # such as a bundle
    assert find_recipe(Path("qwen3-8b"))[0].name == "qwen3-8b.yaml"
    Path("qwen3-4b").write_text("d2sd: 1")
    assert find_recipe(Path("qwen3-4b")) == (Path("qwen3-4b"), Path())


@pytest.mark.parametrize("written", ["smollm3", "recipes/smollm2-135m.yaml", "elsewhere/qwen3-8b"])
def test_an_unknown_recipe_is_answered_with_the_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="There is no such recipe") as raised:
        load_recipe(Path(written))
    assert ", ".join(shipped_names()) in str(raised.value)


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-flex"])
def test_shipped_drafters_are_found_in_any_folder_and_those_of_a_clone_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(Path(name))
    _, *drafters = sources_of(recipe)
    assert drafters
    for source in drafters:
        found, file = located(recipe, source), Path(source.path or "").name
        assert found == ROOT / "models" / name / file
        clone = tmp_path / "models" / name / file
        clone.mkdir(parents=True)
        found = located(recipe, source)
        assert found is not None
        assert found.resolve() == clone


def test_no_recipe_names_anything_outside_the_project() -> None:
    known = {Path("data") / wanted.file for wanted in prompt_sets()}
    for name in shipped_names("train"):
        recipe = load_train_recipe(ROOT / "recipes" / "train" / f"{name}.yaml")
        written = [file.path for file in recipe.data.prompts] + recipe.data.exclude
        paths = [Path(os.path.relpath(os.path.normpath(recipe.path(path)), ROOT)) for path in written]
        assert all(path in known or path == Path("training/prompts.jsonl") for path in paths), paths
    for name in shipped_names():
        loaded = load_recipe(ROOT / "recipes" / f"{name}.yaml")
        for source in sources_of(loaded):
            if source.path is not None:
                assert Path(os.path.normpath(loaded.path(source.path))).is_relative_to(ROOT)
