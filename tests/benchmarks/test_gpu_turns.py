"""What is timed has the GPU alone."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.turns import VARIABLE, turn

HOLD = """
import time
from benchmarks.gpu.turns import turn
with turn(alone=False):
    print("held", flush=True)
    time.sleep(1.5)
"""


def test_what_is_timed_waits_for_what_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "lock"))
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with turn(alone=False) as waited:
            assert waited < 1
        begun = time.time()
        with turn(alone=True) as waited:
            assert other.poll() is not None or time.time() - begun > 1
            assert waited > 0.5


def test_nothing_waits_without_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with turn(alone=True) as first, turn(alone=True) as second:
        assert first == second == 0
