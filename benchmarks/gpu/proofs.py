"""Counts tests that need a GPU by their lines in pytest's output, so that an interrupted run still counts.

They are those of the kernels and of training. `tests/runtime/backends/test_tensorrt_cuda.py` asks
for onnxscript, which is not packed for a machine without an index, and is run by itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.brought import VARIABLE
from benchmarks.gpu.cases import Case, Note, Skip

#: File -> most seconds; less where less is left of the part's time, so that what was counted is not lost with it.
#: `tests/plugins/test_triton_kernels.py` runs these on a GPU as one test.
KERNELS = {
    "tests/plugins/kernels/attention.py": 110,
    "tests/plugins/kernels/lookup.py": 40,
    "tests/plugins/kernels/pairs.py": 60,
    "tests/plugins/kernels/pages.py": 40,
    "tests/plugins/kernels/layers.py": 30,
}
TRAINING = {"tests/train/test_cuda.py": 60}


def kernel_cases(folder: Path, until: float) -> Iterator[Case]:
    for file, most in KERNELS.items():
        yield f"pytest/{file}", partial(run_file, folder, file, most, until)


def training_cases(folder: Path, until: float) -> Iterator[Case]:
    """Cases that run no kernel of d2sd: with the Triton that PyTorch came with."""
    for file, most in TRAINING.items():
        yield f"training/{file}", partial(run_file, folder, file, most, until, own_triton=True)


def run_file(
    folder: Path, file: str, most: float, until: float, note: Note, *, own_triton: bool = False, collect: bool = False
) -> dict[str, Any]:
    """Run one file of tests for at most `most` seconds, and until `until` (seconds of `time.time`); its output goes to
    `folder`. Raises where it is cut or any test failed. `own_triton`: without the one that was brought; `collect`: find
    them only.
    """
    for needed in ("pytest", "hypothesis", "pydantic"):
        if find_spec(needed) is None:
            raise Skip(f"{needed} is not installed; benchmarks/gpu_pack.sh packs it")
    log = folder / f"{Path(file).stem}.log"
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", "--tb=short", file]
    command += ["--collect-only"] if collect else []
    limit = max(1.0, min(most, until - time.time()))
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit,
                check=False,
                env=environment(own_triton),
            )
            ended = f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"cut after {limit:.0f} s"
    found = counted(log.read_text(errors="replace"))
    note(**found)
    if ended != "exit status 0":
        raise RuntimeError(f"{ended}; {log.name} has the output")
    if not found["passed"] and not collect:
        raise Skip("no test ran")
    return found


def environment(own_triton: bool) -> dict[str, str]:
    """The variables of this process for pytest; `own_triton`: without the folder that `brought` put in front."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [folder for folder in path if not own_triton or folder != os.environ.get(VARIABLE)]
    return os.environ | {"TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(kept)}


def counted(output: str) -> dict[str, int]:
    """Number of tests by outcome, from the lines of `pytest -v`."""
    ends = Counter(re.findall(r"^\S+::.* (PASSED|FAILED|ERROR|SKIPPED)\b", output, re.MULTILINE))
    return {name: ends[name.upper()] for name in ("passed", "failed", "error", "skipped")}
