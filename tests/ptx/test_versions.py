"""Triton 3.6.0 and 3.7.0 leave out a fence on Hopper; `plugins/dispatch.py` refuses them. Their kernels do fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra triton is not installed")

from d2sd.plugins.dispatch import FENCED_TRITON, triton_version

ROOT = Path(__file__).parents[2]
FAULT = "fault: wgmma reads what threads or cp.async wrote without fence.proxy.async, at `wgmma"


def said(folder: Path | None, size: int) -> str:
    """Return what the child prints, with the Triton of this folder or the installed one."""
    path = os.pathsep.join(str(part) for part in (folder, ROOT) if part)
    done = subprocess.run(
        [sys.executable, "-m", "tests.ptx.version_child", str(size)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
    )
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.subprocess
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("version", ["3.6.0", "3.7.0"])
def test_triton_without_the_fence_faults(version: str, size: int) -> None:
    folder = ROOT / "build" / f"triton-{version}"
    if not folder.exists():
        pytest.skip(f"`make ptx` installs Triton {version} into {folder}")
    assert said(folder, size).startswith(f"{version} {FAULT}")


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.subprocess
@pytest.mark.parametrize("size", [64, 128])
def test_the_installed_triton_does_not(size: int) -> None:
    assert triton_version() >= FENCED_TRITON
    assert said(None, size) == f"{triton_version()} no fault"
