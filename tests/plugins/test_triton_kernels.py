"""The kernels against their specifications, in processes of their own: Triton's interpreter must be on before Triton is
imported, and no kernel that was imported under it can be compiled afterwards.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent / "kernels"
#: Half of the work, for another worker.
LARGE = {"attention", "exact"}
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the extra triton is not installed")


def files(*, large: bool) -> list[str]:
    return sorted(str(path) for path in FOLDER.glob("[a-z]*.py") if (path.stem in LARGE) == large)


def run(paths: list[str], which: str, interpreted: bool = True) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=0", "-m", which, *paths],
        cwd=FOLDER.parents[2],
        env=os.environ | {"TRITON_INTERPRET": str(int(interpreted))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " skipped" not in done.stdout


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.timeout(900)
@pytest.mark.parametrize("large", [True, False], ids=["large", "small"])
def test_kernels_under_the_interpreter(large: bool) -> None:
    run(files(large=large), "not slow")


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.interpreter
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("large", [True, False], ids=["large", "small"])
def test_kernels_under_the_interpreter_in_every_case(large: bool) -> None:
    run(files(large=large), "slow")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_on_a_gpu() -> None:
    run([*files(large=True), *files(large=False)], "not interpreter", interpreted=False)
