"""Runs runtime/ in a process of its own."""

from __future__ import annotations

import pytest

from tests.conftest import Once
from tools.cuda import guard


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.timeout(300)
@pytest.mark.parametrize("selection", ["not slow", "slow"])
def test_engines_and_faults_on_the_stand_in(selection: str, once: Once) -> None:
    files = (f"tests/cuda/runtime/{name}.py" for name in ("faults", "engines"))
    guard.run_tests(once("cuda-guard", guard.build), "-m", selection, *files)
