"""Does TensorRT-RTX accept this device? A product of two matrices, from prebuilt engines and from one built here.

An engine is tried in a process of its own (`rtx_engine`): one that crashes loses the steps behind it, and those of no
other engine. A refusal is an answer, not a failure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case, Note, Skip
from benchmarks.gpu.rtx_engine import CURRENT, MODULES, PORTABLE, PREBUILT

LIMIT = 60  # seconds an engine
CARRY = "`sh benchmarks/gpu_pack.sh pack rtx` packs it for a machine without an index"


def cases(folder: Path) -> Iterator[Case]:
    """Engines of `folder`, and one built for the device that is here."""
    for name in (PORTABLE, CURRENT, *(name for name in PREBUILT if name != PORTABLE)):
        yield f"probe/{name}", partial(probe, name if name == CURRENT else str(folder / f"{name}.engine"))


def probe(engine: str, note: Note) -> dict[str, Any]:
    """The steps of an engine and what they say together."""
    if not any(find_spec(name) for name in MODULES):
        raise Skip(f"TensorRT-RTX is not importable; {CARRY}")
    if engine != CURRENT and not Path(engine).exists():
        raise Skip(f"no engine {engine}; {CARRY}, engines included")
    command = [sys.executable, "-m", "benchmarks.gpu.rtx_engine", "run", engine]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        last = (done.stderr.strip().splitlines() or ["in silence"])[-1][:200]
        output, ended = done.stdout, f"exit status {done.returncode} ({last})" if done.returncode else ""
    except subprocess.TimeoutExpired as cut:
        said_so_far = cut.stdout or b""  # bytes, also where text was asked for
        output = said_so_far.decode() if isinstance(said_so_far, bytes) else said_so_far
        ended = f"cut after {LIMIT} s"
    steps = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]
    note(steps=steps)
    return {"steps": steps, "answer": answer(steps, ended)}


def answer(steps: list[dict[str, Any]], ended: str) -> str:
    """One line of what the steps say; `ended`: how the process ended where that was not in peace."""
    wrong = "; ".join(f"{step['step']}: {step['said']}" for step in steps if not step["ok"])
    if ended:
        wrong = f"{ended} after {steps[-1]['step'] if steps else 'its start'}" + (f"; {wrong}" if wrong else "")
    if steps and steps[-1]["step"] == "execute" and steps[-1]["ok"]:
        return f"runs, relative error {steps[-1]['found']}" + (f"; but {wrong}" if wrong else "")
    return wrong or "nothing was said"
