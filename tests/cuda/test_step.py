"""Runs step.py and tree.py in a process of their own."""

from __future__ import annotations

import pytest

from tests.conftest import Once
from tools.cuda import guard


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.timeout(600)
@pytest.mark.parametrize("selection", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_the_step_on_fake_cuda_tensors(selection: str, once: Once) -> None:
    folder = once("cuda-guard", guard.build)
    guard.run_tests(folder, "-m", selection, "tests/cuda/step.py", "tests/cuda/tree.py")
