"""A step on a GPU has all its tensors there: shown on fake CUDA tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import Once
from tools.cuda import guard

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_nothing_crosses_in_a_step(once: Once) -> None:
    folder = once("cuda-guard", guard.build)
    if torch.version.cuda is not None or (folder / "failed").exists():
        pytest.skip("fake CUDA tensors need PyTorch for CPUs, and a compiler for their device guard")
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.fake_cuda", str(folder), "first", "second", "flex"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second, flex = (json.loads(line) for line in done.stdout.splitlines())
    assert first["crossing"] == second["crossing"] == flex["crossing"] == {}
    assert all(found["operators"] > 500 for found in (first, second, flex))
