"""The head's kernels, under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

KERNELS = Path(__file__).parent / "kernels_of_head.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("triton") is None, reason="the extra triton is not installed")
def test_kernels_under_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(KERNELS)],
        cwd=KERNELS.parents[3],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
