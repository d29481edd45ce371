"""Runs what engines and trainings do on fake CUDA tensors in a process of its own."""

from __future__ import annotations

import pytest

from tests.conftest import Once
from tools.cuda import guard


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize("selection", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_engines_and_trainings_on_fake_cuda_tensors(selection: str, once: Once) -> None:
    folder = once("cuda-guard", guard.build)
    guard.run_tests(folder, "-m", selection, "tests/cuda/engine.py", "tests/cuda/training.py")
