"""Executions kept on disk: the same PTX over the same bytes ends as it did, while the simulator is the same.

The folder is the environment variable PTXSIM_KEPT; without, every launch is executed. What tests then look at, memory,
counts or the fault, is the same either way: nothing is passed over but the work. A file is as long as what was written.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import numpy as np

from tools.ptxsim.memory import Placed
from tools.ptxsim.order import DividedWarp, Fault
from tools.ptxsim.values import Array

FOLDER = "PTXSIM_KEPT"
_FAULTS = {kind.__name__: kind for kind in (Fault, DividedWarp)}
#: Where in its source an instruction comes from: other in every checkout, and nothing to the simulator.
_LINES = re.compile(r"^\s*(\.loc|\.file|//).*\n|^\s*\.section\s+\.debug_[^}]*}\n", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """Results of a launch: bytes of each tensor, and the instructions that ran."""

    memory: list[Array]
    counts: Counter[str]
    executed: int
    cycles: int | None = None


@cache
def _simulator() -> str:
    """A hash of this folder and of NumPy's version."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join([np.__version__.encode(), *(path.read_bytes() for path in files)])).hexdigest()


def key_of(ptx: str, placed: Sequence[Placed], *numbers: object) -> str:
    """A hash of a launch: its code, its tensors as they lie in memory, and its other arguments."""
    found = sha256(repr((_simulator(), _LINES.sub("", ptx), numbers)).encode())
    for tensor in placed:
        marks = (np.packbits(mark) if isinstance(mark, np.ndarray) else mark for mark in (tensor.writable, tensor.used))
        for part in (tensor.data, *marks):
            data = part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
            found.update(repr((tensor.name, tensor.shift, len(data))).encode() + data)
    return found.hexdigest()


def kept(key: str, run: Callable[[], Ended], writable: Sequence[bool]) -> Ended:
    """Return or raise as `run` does, from the folder where it is there. `writable` [tensors]: which are read back.

    Raises Fault as `run` does.
    """
    path = Path(os.environ[FOLDER]) / key[:2] / f"{key}.npz"
    if path.exists():
        with np.load(path) as file:
            told = json.loads(str(file["told"]))
            if "fault" in told:
                raise _FAULTS[told["fault"]](told["message"])
            memory = [file[str(number)] if one else np.empty(0, np.uint8) for number, one in enumerate(writable)]
        return Ended(memory, Counter(told["counts"]), told["executed"])
    try:
        ended = run()
    except Fault as fault:
        _keep(path, {"fault": type(fault).__name__, "message": str(fault)}, {})
        raise
    written = {str(number): ended.memory[number] for number, one in enumerate(writable) if one}
    _keep(path, {"counts": ended.counts, "executed": ended.executed}, written)
    return ended


def _keep(path: Path, told: dict[str, object], written: dict[str, Array]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{uuid4().hex}.npz")  # whole or not at all
    np.savez_compressed(part, allow_pickle=False, told=np.array(json.dumps(told)), **written)
    part.replace(path)
