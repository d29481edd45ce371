"""Which prompts are answered for training: those of files, and user turns that the target writes itself.

In two stages, because turns written at once by several processes finish in any order: first every turn is written to
disk, then all prompts are filtered together (`decontaminate.py`) in the order of the plan, and the rest are answered.
So the set that is answered depends on the recipe alone, however often the run was interrupted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TextIO

from pydantic import ConfigDict, model_validator

from d2sd.errors import D2SDError
from d2sd.train.data import jsonl
from d2sd.train_recipe import Data, SelfWritten

KIND = "turns"


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt: a whole user turn to answer, or the opening of one that the target is to write first."""

    id: str
    text: str
    kind: SelfWritten | None = None  # how to go on, where `text` is an opening


@dataclass(frozen=True, slots=True)
class Turn:
    """A user turn that the target wrote, its opening included, or why it was dropped."""

    id: str
    text: str = ""
    dropped: str | None = None


def plan_prompts(files: Iterable[tuple[Sequence[tuple[str, str]], int | None]], data: Data, seed: int = 0) -> list[Job]:
    """All jobs in a seeded random order, so that any first part of them is a fair sample.

    `files` holds for each prompt file its (id, user turn) pairs and how many are wanted. A job's place is drawn from
    the seed and its id alone: a count that is raised, or another file, adds jobs and never swaps those already there.
    `self_written.count` is how many turns are tried, not how many survive: the plan is then known before
    the target has run. Raises D2SDError where an id is not unique.
    """

    def place(name: str) -> int:
        return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big")

    jobs = []
    for prompts, count in files:
        chosen = sorted(prompts, key=lambda prompt: place(prompt[0]))[:count]
        jobs += [Job(name, text) for name, text in chosen]
    for kind in data.self_written:
        names = [f"self/{kind.name}/{i}" for i in range(kind.count)]
        jobs += [Job(name, kind.openings[place(name) % len(kind.openings)], kind) for name in names]
    if repeated := [name for name, times in Counter(job.id for job in jobs).items() if times > 1]:
        raise D2SDError("two prompts have the same id", where="data.prompts", found=repeated[0])
    return sorted(jobs, key=lambda job: place(job.id))


def take_turns(jobs: Sequence[Job], path: Path) -> tuple[list[Job], dict[str, str]]:
    """(jobs with every opening replaced by its turn in `path`, id -> why there is none).

    `path` is a file or the folder of every process's. What is not there yet stays an opening.
    Raises D2SDError for a damaged line, and for a turn that does not begin with its opening (another recipe's).
    """
    found = {turn.id: (where, turn) for where, turn in jsonl.read_rows(path, KIND, TurnLine)}
    taken, dropped = [], {}
    for job in jobs:
        if job.kind is None or job.id not in found:
            taken.append(job)
            continue
        where, turn = found[job.id]
        if turn.text is None:
            dropped[job.id] = turn.dropped or ""
        elif turn.text.startswith(job.text):
            taken.append(Job(job.id, turn.text))
        else:
            raise D2SDError(
                "a turn continues another opening", where=where, found=turn.text[:40], expected=job.text,
                fix="restore data.self_written.openings, or train into another --work folder",
            )  # fmt: skip
    return taken, dropped


def append_turn(out: TextIO, turn: Turn) -> None:
    """Append and flush one line."""
    content = {"text": turn.text} if turn.dropped is None else {"dropped": turn.dropped}
    jsonl.append_row(out, {"id": turn.id, **content})


class TurnLine(jsonl.Named):
    """A line on disk: a turn, or why there is none."""

    model_config = ConfigDict(strict=True)

    text: str | None = None
    dropped: str | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TurnLine:
        if (self.text is None) == (self.dropped is None):
            raise ValueError("expected either text or dropped")
        return self
