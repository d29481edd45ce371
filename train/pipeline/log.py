"""The logs of a training: one line per step, one per evaluation, and the measured speed of each stage.

    <work>/first.jsonl    {"step": 1, "loss": ..., terms, "gradient norm": ..., "learning rate": ..., "seconds": ...}
                          {"step": 500, "tau": {"chain": ...}, "cells": [...], "seconds": ...}
    <work>/pace.jsonl     {"stage": "answers", "count": ..., "seconds": ...}

A run that resumes from step n first removes the lines of later steps, so no step is logged twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt

from d2sd.io import atomic_write
from d2sd.policies import DrafterName
from d2sd.runtime.evaluation import Evaluation
from d2sd.schema import Schema
from d2sd.train.data.jsonl import append_to, parse_row, whole_lines
from d2sd.viz.training import Curve

_PACE = "pace.jsonl"
#: Keys of a log line that are not terms of the loss.
_OTHER = ("gradient norm", "learning rate")


class Say(Protocol):
    """Prints a line for the user: a result, or with `err` a notice. `click.echo` is one implementation."""

    def __call__(self, message: str, /, *, err: bool = False) -> None: ...


class _LogLine(BaseModel):
    """A step with its loss terms as extra keys, or an evaluation with `cells`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float]  # typed, so that every other key is a number

    step: PositiveInt
    seconds: NonNegativeFloat
    tau: dict[str, float] | None = None
    cells: list[Evaluation] | None = None

    @property
    def order(self) -> tuple[int, bool]:
        """Sort key: the evaluation of a step comes after the step."""
        return self.step, self.cells is not None


class _PaceLine(BaseModel):
    stage: str
    count: PositiveInt
    seconds: NonNegativeFloat


class TrainLog:
    """Appends to one drafter's log."""

    def __init__(self, work: Path, name: DrafterName) -> None:
        self._path = work / f"{name}.jsonl"
        self._begun = False
        self._clock = time.monotonic()

    def add_step(self, step: int, metrics: dict[str, float]) -> None:
        """Log a step: loss, its terms, gradient norm, learning rate."""
        self._add({"step": step, **metrics})

    def add_evaluation(self, step: int, evaluations: Sequence[Evaluation]) -> None:
        """Log the evaluation of each method after this step."""
        tau = {evaluation.method: round(evaluation.tau, 4) for evaluation in evaluations}
        self._add({"step": step, "tau": tau, "cells": [cell.model_dump(mode="json") for cell in evaluations]})

    def restart_clock(self) -> None:
        """Exclude the time since the last line from the next line's seconds."""
        self._clock = time.monotonic()

    def _add(self, row: dict[str, Any]) -> None:
        if not self._begun:  # remove this row and later ones, logged by an interrupted run
            order = row["step"], "cells" in row
            lines, rows = whole_lines(self._path), _rows(self._path, _LogLine)
            earlier = [line for line, logged in zip(lines, rows, strict=True) if logged.order < order]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._path) as partial:
                partial.write_bytes(b"".join(line + b"\n" for line in earlier))
            self._begun = True
        seconds, self._clock = time.monotonic() - self._clock, time.monotonic()
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row | {"seconds": round(seconds, 4)}) + "\n")


def read_log(work: Path, name: DrafterName) -> Curve:
    """The training curve of a drafter so far; empty before its first step. Raises D2SDError for a damaged line."""
    steps, evaluations = [], []
    for row in _rows(work / f"{name}.jsonl", _LogLine):
        if row.cells is not None:
            evaluations.append((row.step, row.cells))
        else:
            terms = {term: value for term, value in (row.model_extra or {}).items() if term not in _OTHER}
            steps.append((row.step, terms))
    return Curve(name, steps, evaluations)


def seconds_each(work: Path, name: DrafterName) -> tuple[int, float | None, float | None]:
    """Steps done, and the measured seconds per step and per evaluation; None if there is no measurement."""
    rows = _rows(work / f"{name}.jsonl", _LogLine)
    steps = [row.seconds for row in rows if row.cells is None]
    evaluations = [row.seconds for row in rows if row.cells is not None]
    median = sorted(steps[-100:])[len(steps[-100:]) // 2] if steps else None
    return len(steps), median, evaluations[-1] if evaluations else None


@contextmanager
def paced(work: Path, stage: str, processes: int) -> Iterator[Callable[[int], None]]:
    """Measure the speed of a stage; call the yielded function with the number of items this process finished."""
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
    """Seconds per item of a stage, over all runs so far; None if there is no measurement."""
    rows = [row for row in _rows(work / _PACE, _PaceLine) if row.stage == stage]
    return sum(row.seconds for row in rows) / sum(row.count for row in rows) if rows else None


def _rows(path: Path, row_type: type[Schema]) -> list[Schema]:
    """The complete lines of a log. Raises D2SDError naming the file and line of a damaged one."""
    return [
        parse_row(row_type, line, f"{path}:{i}", "a damaged line of a training log")
        for i, line in enumerate(whole_lines(path), 1)
    ]
