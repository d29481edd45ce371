"""Runs runtime/ in a process of its own: the device guard that it loads stays loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Once
from tools.cuda import guard

FOLDER = Path(__file__).parent / "runtime"


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.timeout(300)
@pytest.mark.parametrize("selection", ["not slow", "slow"])
def test_engines_and_faults_on_the_stand_in(selection: str, once: Once) -> None:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", selection]
    done = subprocess.run(
        [sys.executable, *command, str(FOLDER / "faults.py"), str(FOLDER / "engines.py")],
        capture_output=True,
        text=True,
        check=False,
        cwd=FOLDER.parents[2],
        env=os.environ | {"D2SD_CUDA_GUARD": str(once("cuda-guard", guard.build))},
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    if " passed" not in done.stdout:
        pytest.skip(done.stdout[-500:])
