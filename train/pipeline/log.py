"""What a training writes down on its way: a line a step, a line an evaluation, and how fast its stages were.

    <work>/first.jsonl    {"step": 1, "loss": ..., terms, "gradient norm": ..., "learning rate": ..., "seconds": ...}
                          {"step": 500, "tau": {"chain": ...}, "cells": [...], "seconds": ...}
    <work>/pace.jsonl     {"stage": "answers", "count": ..., "seconds": ...}

A run that resumes from step n first cuts off what was written of later steps, so no step stands twice.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from d2sd.bench import metrics
from d2sd.bench.result import Cell, Drafter
from d2sd.train.data.jsonl import append_to
from d2sd.viz.training import Curve

_PACE = "pace.jsonl"
#: Of a line of the log, what is no term of the loss.
_OTHER = ("step", "gradient norm", "learning rate", "seconds")


class TrainLog:
    """Appends to one drafter's log, and to TensorBoard's where that is installed."""

    def __init__(self, work: Path, name: Drafter) -> None:
        self._path, self._events = work / f"{name}.jsonl", work / "tensorboard" / name
        self._board: Any = None
        self._begun = False
        self._clock = time.monotonic()

    def trained(self, step: int, said: dict[str, float]) -> None:
        """A step: loss, its terms, gradient norm, learning rate."""
        self._add({"step": step, **said}, said)

    def evaluated(self, step: int, cells: Sequence[Cell]) -> None:
        scalars = {f"tau/{cell.method}": metrics.tau(cell) for cell in cells}
        for cell in cells:
            shares = enumerate(metrics.joint_acceptance(cell), 1)
            scalars |= {f"acceptance of {cell.method}/position {place}": share for place, share in shares}
            for drafter, error in calibration_errors(cell).items():
                scalars[f"calibration error of {cell.method}/{drafter}"] = error
        tau = {cell.method: round(metrics.tau(cell), 4) for cell in cells}
        self._add({"step": step, "tau": tau, "cells": [cell.model_dump(mode="json") for cell in cells]}, scalars)

    def rest(self) -> None:
        """What was done since the last line is no part of the next."""
        self._clock = time.monotonic()

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def _add(self, row: dict[str, Any], scalars: dict[str, float]) -> None:
        if not self._begun:
            self._begin(row)
        seconds, self._clock = time.monotonic() - self._clock, time.monotonic()
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row | {"seconds": round(seconds, 4)}) + "\n")
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, row["step"])
            if "cells" in row:
                self._board.flush()

    def _begin(self, row: dict[str, Any]) -> None:
        """Cut off what an interrupted run wrote from this row on."""
        kept = [one for one in _rows(self._path) if _place(one) < _place(row)]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(one) + "\n" for one in kept), "utf-8")
        partial.replace(self._path)
        if tensorboard_is_installed():
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(self._events, purge_step=row["step"])
        self._begun = True


def calibration_errors(cell: Cell) -> dict[Drafter, float]:
    """Expected calibration error of what each drafter said of its tokens, uncorrected."""
    found = {drafter: metrics.calibration_error(bins) for drafter, bins in cell.calibration.items()}
    return {drafter: error for drafter, error in found.items() if error is not None}


def read_log(work: Path, name: Drafter) -> Curve:
    """What was logged of a drafter so far; nothing of one that has not begun."""
    steps, evaluations = [], []
    for row in _rows(work / f"{name}.jsonl"):
        if "cells" in row:
            evaluations.append((row["step"], [Cell.model_validate(cell) for cell in row["cells"]]))
        else:
            steps.append((row["step"], {term: value for term, value in row.items() if term not in _OTHER}))
    return Curve(name, steps, evaluations)


def seconds_each(work: Path, name: Drafter) -> tuple[int, float | None, float | None]:
    """Steps done, and the measured seconds of a step and of an evaluation; None where none was made."""
    rows = _rows(work / f"{name}.jsonl")
    steps = [row["seconds"] for row in rows if "cells" not in row]
    evaluations = [row["seconds"] for row in rows if "cells" in row]
    middle = sorted(steps[-100:])[len(steps[-100:]) // 2] if steps else None
    return len(steps), middle, evaluations[-1] if evaluations else None


def tensorboard_is_installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


@contextmanager
def paced(work: Path, stage: str, processes: int) -> Iterator[Callable[[int], None]]:
    """Measure how fast a stage is; what it yields is told how much this one of its processes has done."""
    start, done = time.monotonic(), 0

    def count(more: int) -> None:
        nonlocal done
        done += more

    try:
        yield count
    finally:
        if done:
            row = {"stage": stage, "count": done * processes, "seconds": round(time.monotonic() - start, 3)}
            with append_to(work / _PACE) as out:
                out.write(json.dumps(row) + "\n")


def pace(work: Path, stage: str) -> float | None:
    """Seconds for one of a stage, over all runs so far; None where nothing was measured."""
    rows = [row for row in _rows(work / _PACE) if row["stage"] == stage]
    return sum(row["seconds"] for row in rows) / sum(row["count"] for row in rows) if rows else None


def _rows(path: Path) -> list[dict[str, Any]]:
    """Whole lines; an interruption leaves at most one cut line, the last."""
    data = path.read_bytes() if path.is_file() else b""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]]


def _place(row: dict[str, Any]) -> tuple[int, bool]:
    """A step's evaluation comes behind the step."""
    return row["step"], "cells" in row
