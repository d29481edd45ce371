"""On CUDA a step is one copy in, one graph without any copy, and one copy out: shown on fake CUDA tensors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
#: Every policy once, and every kind of sampling.
RUNS = (
    ("off", "hot"), ("lookup", "greedy"), ("chain", "narrow"), ("samples", "greedy"), ("reanchor", "greedy"),
    ("d2sd", "hot"), ("ddtree", "greedy"), ("hybrid", "greedy"),
)  # fmt: skip
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>); }
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch for CUDA has a device guard of its own")
@pytest.mark.skipif(shutil.which("g++") is None, reason="a device guard is compiled with g++, and there is none")
def test_a_step_is_one_copy_in_and_one_out(tmp_path: Path) -> None:
    source, library = tmp_path / "guard.cpp", tmp_path / "guard.so"
    source.write_text(GUARD)
    torch_folder = Path(torch.__file__).parent
    flags = ["-shared", "-fPIC", "-I", str(torch_folder / "include"), "-L", str(torch_folder / "lib"), "-lc10"]
    subprocess.run(["g++", str(source), "-o", str(library), *flags], check=True, timeout=120)
    command = [sys.executable, "-m", "tests.runtime.fake_cuda", str(library), *chain(*RUNS)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(RUNS)
    for run in found:
        (graph,) = run["captured"]
        assert graph["operators"] > 100
        assert not graph["crossing"], run
        assert run["step"] == {"copy_": 1, "to": 1}, run
