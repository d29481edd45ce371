"""The wheel, installed where this checkout cannot be imported. tests/test_readme.py runs its commands."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.wheel import FOLDERS, ROOT, run

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]
#: Suffixes of package data.
DATA_FILES = {".yaml", ".css", ".js", ".html", ".svg", ".jinja", ".j2", ".c", ".h", ".json", ".safetensors"}


def test_the_wheel_holds_every_module_and_data_file_and_nothing_else(wheel: Path) -> None:
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    expected = {p.relative_to(ROOT).as_posix() for p in (ROOT / "d2sd").iterdir() if p.is_file()}
    inside = [p for p in (ROOT / "d2sd").iterdir() if p.is_dir() and not p.is_symlink()]
    for path in (path for folder in inside for path in folder.rglob("*")):
        if path.suffix in {".py", *DATA_FILES}:
            expected.add(path.relative_to(ROOT).as_posix())
    for path in (path for folder in (*FOLDERS, "recipes", "models") for path in (ROOT / folder).rglob("*")):
        if path.suffix in {".py", *DATA_FILES}:
            expected.add(f"d2sd/{path.relative_to(ROOT).as_posix()}")
    assert set(names) == expected, "packages in pyproject.toml are listed by hand"


def test_nothing_but_d2sd_is_importable(python: Path, tmp_path: Path) -> None:
    program = (
        "import importlib.util as u, d2sd, d2sd.build.pipeline, d2sd.modeling.decoder\n"
        f"print([n for n in {FOLDERS} if u.find_spec(n)], d2sd.__file__)"
    )
    out = run(python, "-c", program, folder=tmp_path)
    assert out.startswith("[] ")
    assert str(ROOT) not in out


def test_every_recipe_is_reached_by_name(python: Path, tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\n"
        "from d2sd.recipe import load_recipe\n"
        "from d2sd.shipped import shipped_names\n"
        "from d2sd.train_recipe import load_train_recipe\n"
        "for name in shipped_names(): load_recipe(Path(name))\n"
        "for name in shipped_names('train'): load_train_recipe(Path(name))\n"
        "print(*shipped_names(), *shipped_names('train'))"
    )
    folders = (ROOT / "recipes", ROOT / "recipes" / "train")
    names = [name for folder in folders for name in sorted(path.stem for path in folder.glob("*.yaml"))]
    assert run(python, "-c", program, folder=tmp_path).split() == names
