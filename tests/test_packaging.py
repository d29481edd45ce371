"""The wheel, installed where nothing of this checkout is in reach: commands run, and nothing lands beside `d2sd`."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("plugins", "modeling", "convert", "runtime", "train")


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy: setuptools leaves build/ and egg-info behind."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "d2sd", *FOLDERS):
        run("cp", "-a", ROOT / name, copy, folder=ROOT)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", out, copy, folder=out)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh venv that borrows our dependencies through a .pth, which does not run their own .pth files.

    So the editable install of this checkout is out of reach, and torch is not downloaded again.
    """
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps")
    run(*pip, "--no-index", "--force-reinstall", wheel, folder=folder)
    return folder / "bin" / "python"


def test_the_wheel_holds_every_module_and_data_file_and_nothing_else(wheel: Path) -> None:
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    expected = {p.relative_to(ROOT).as_posix() for p in (ROOT / "d2sd").iterdir() if p.is_file()}
    for inside in ("cli", "bench"):
        expected |= {p.relative_to(ROOT).as_posix() for p in (ROOT / "d2sd" / inside).rglob("*.py")}
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
