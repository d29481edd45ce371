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

from tests.conftest import Once

pytestmark = pytest.mark.subprocess
ROOT = Path(__file__).parents[1]
FOLDERS = ("plugins", "modeling", "convert", "runtime", "train")


def run(*command: str | Path, folder: Path) -> str:
    """Without PYTHONPATH, which would put this checkout in reach."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheel(once: Once) -> Path:
    """Build from a copy: setuptools leaves build/ and egg-info behind."""

    def make(folder: Path) -> None:
        copy, out = folder / "copy", folder / "out"
        copy.mkdir()
        for name in ("pyproject.toml", "README.md", "LICENSE", "d2sd", *FOLDERS):
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
    for inside in (path for path in (ROOT / "d2sd").iterdir() if path.is_dir() and not path.is_symlink()):
        expected |= {p.relative_to(ROOT).as_posix() for p in inside.rglob("*.py")}
    for folder in FOLDERS:
        expected |= {f"d2sd/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / folder).rglob("*.py")}
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
