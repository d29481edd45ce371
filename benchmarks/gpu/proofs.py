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

from benchmarks.gpu.cases import Case, Note, Skip

#: The first, the second and the last are run by `tests/plugins/test_triton_kernels.py` on a GPU, as one test.
FILES = (
    "tests/plugins/kernels/pages.py",
    "tests/plugins/kernels/layers.py",
    "tests/train/test_cuda.py",
    "tests/plugins/kernels/attention.py",
)
#: Most seconds for each; less where less is left of the part's time, so that what was counted is not lost with it.
LIMITS = dict(zip(FILES, (40, 30, 60, 110), strict=True))


def cases(folder: Path, until: float) -> Iterator[Case]:
    for file in FILES:
        yield f"pytest/{file}", partial(run_file, folder, file, until)


def run_file(folder: Path, file: str, until: float, note: Note, *, collect: bool = False) -> dict[str, Any]:
    """Run one file of tests until `until` (seconds of `time.time`) at the latest; its output goes to `folder`. Raises
    where it is cut or any test failed. `collect`: find them only.
    """
    for needed in ("pytest", "hypothesis", "pydantic"):
        if find_spec(needed) is None:
            raise Skip(f"{needed} is not installed; benchmarks/pack_tensorrt_rtx.sh packs it")
    log = folder / f"{Path(file).stem}.log"
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", "--tb=short", file]
    command += ["--collect-only"] if collect else []
    limit = max(1.0, min(LIMITS[file], until - time.time()))
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit,
                check=False,
                env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1"},
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


def counted(output: str) -> dict[str, int]:
    """Number of tests by outcome, from the lines of `pytest -v`."""
    ends = Counter(re.findall(r"^\S+::.* (PASSED|FAILED|ERROR|SKIPPED)\b", output, re.MULTILINE))
    return {name: ends[name.upper()] for name in ("passed", "failed", "error", "skipped")}
