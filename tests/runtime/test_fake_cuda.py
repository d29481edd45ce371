"""On CUDA a step is one copy in, one graph without any copy, and one copy out; a prefill is one copy in, and one out
for each 64 prompt tokens that are reported. The host waits for none of them. Shown on fake CUDA tensors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

from tests.conftest import Once
from tools.cuda import guard

ROOT = Path(__file__).parents[2]
#: Every number of passes, a draft of the host, and every kind of sampling.
RUNS = ("off", "hot"), ("lookup", "greedy"), ("chain", "narrow"), ("d2sd", "hot"), ("flex", "hot"), ("d2sd", "windows")
#: The other policies: their operators are compared with the host's in tests/cuda/step.py, too.
OTHERS = ("reanchor", "greedy"), ("ddtree", "greedy"), ("hybrid", "greedy")


@pytest.mark.slow
@pytest.mark.parametrize("runs", [RUNS, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["passes", "others"])
def test_a_step_is_one_copy_in_and_one_out(runs: tuple[tuple[str, str], ...], once: Once) -> None:
    folder = once("cuda-guard", guard.build)
    if torch.version.cuda is not None or (folder / "failed").exists():
        pytest.skip("fake CUDA tensors need PyTorch for CPUs, and a compiler for their device guard")
    command = [sys.executable, "-m", "tests.runtime.fake_cuda", str(folder), *chain(*runs)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(runs)
    for run in found:
        (graph,) = run["captured"]
        assert graph["operators"] > 100
        assert not graph["crossing"], run
        assert run["step"] == {"copy_": 1, "to": 1}, run
        assert run["joining"] == {"copy_": 2, "to": 1}, run
        assert run["reported"] == {"copy_": 1, "_to_copy": 1}, run
