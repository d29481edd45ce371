"""The suite's code around the kernels, in a process of its own: Triton's interpreter must be on before Triton is
imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FILES = [Path(__file__).parent / name for name in ("interpreted.py", "interpreted_choices.py")]


@pytest.mark.skipif(find_spec("triton") is None, reason="the extra triton is not installed")
@pytest.mark.slow
def test_the_suite_under_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *FILES],
        cwd=FILES[0].parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " skipped" not in done.stdout
