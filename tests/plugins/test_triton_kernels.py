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
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the extra triton is not installed")


def run(names: list[str], *options: str, **environment: str) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options,
            *(FOLDER / f"{n}.py" for n in names),
        ],
        cwd=FOLDER.parents[2], env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " skipped" not in done.stdout


@pytest.mark.interpreter
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "names",
    [["attention", "exact"], ["pages", "models", "layers", "trees", "branches", "handover", "choices"]],
    ids=" ".join,
)
def test_kernels_under_the_interpreter(names: list[str]) -> None:
    run(names, "-m", "not slow", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.timeout(300)
def test_kernels_under_the_interpreter_in_more_cases() -> None:
    run(["trees", "branches", "handover", "choices"], "-m", "slow and not full", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.interpreter
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["attention", "trees", "choices", "steps", "exact"])
def test_kernels_under_the_interpreter_in_every_case(name: str) -> None:
    run([name], "-m", "slow", TRITON_INTERPRET="1")


@pytest.mark.subprocess
def test_launchers_bind_what_is_compiled_ahead_of_time() -> None:
    run(["binding"], TRITON_INTERPRET="0")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_on_a_gpu() -> None:
    run(["attention", "pages", "layers", "trees", "branches", "handover", "choices"], TRITON_INTERPRET="0")
