"""Runs step.py in a process of its own: the device guard that it loads stays loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Once
from tools.cuda import guard

FOLDER = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.timeout(600)
@pytest.mark.parametrize("selection", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_the_step_on_fake_cuda_tensors(selection: str, once: Once) -> None:
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        selection,
        str(FOLDER / "step.py"),
        str(FOLDER / "tree.py"),
    ]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=FOLDER.parents[1],
        env=os.environ | {"D2SD_CUDA_GUARD": str(once("cuda-guard", guard.build))},
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    if " passed" not in done.stdout:
        pytest.skip(done.stdout[-500:])
