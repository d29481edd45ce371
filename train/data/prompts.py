"""Which prompts are answered for training: those of files, and user turns that the target writes itself.

In two stages, because turns written at once by several processes finish in any order: first every turn is written to
disk, then all prompts are screened together (`screen.py`) in the order of the plan, and what is left is answered. So
the set that is answered depends on the recipe alone, however often the run was interrupted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TextIO

from d2sd.errors import D2SDError
from d2sd.train.data import jsonl as journal
from d2sd.train_recipe import Data, SelfWritten

KIND = "turns"


@dataclass(frozen=True, slots=True)
class Job:
    """A text to work on: a whole user turn to answer, or the opening of one that the target is to write first."""

    id: str
    text: str
    kind: SelfWritten | None = None  # how to go on, where `text` is an opening


@dataclass(frozen=True, slots=True)
class Turn:
    """What the target wrote behind an opening, opening included, or why that is no turn."""

    id: str
    text: str = ""
    dropped: str | None = None


def plan_prompts(files: Iterable[tuple[Sequence[tuple[str, str]], int | None]], data: Data, seed: int = 0) -> list[Job]:
    """All jobs in a seeded random order, so that any first part of them is a fair sample.

    `files` holds for each prompt file its (id, user turn) pairs and how many are wanted. A job's place is drawn from
    the seed and its id alone: a count that is raised, or another file, adds jobs and never swaps those already there.
    `self_written.count` is how many turns are tried, not how many survive: the plan is then known before
    the target has said a word. Raises D2SDError where an id is not unique.
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
    found = {turn.id: (where, turn) for where, turn in journal.read_rows(path, KIND, _parse, "id and text or dropped")}
    taken, dropped = [], {}
    for job in jobs:
        if job.kind is None or job.id not in found:
            taken.append(job)
            continue
        where, turn = found[job.id]
        if turn.dropped is not None:
            dropped[job.id] = turn.dropped
        elif turn.text.startswith(job.text):
            taken.append(Job(job.id, turn.text))
        else:
            raise D2SDError(
                "a turn was written behind another opening", where=where, found=turn.text[:40], expected=job.text,
                fix="restore data.self_written.openings, or train into another --work folder",
            )  # fmt: skip
    return taken, dropped


def append_turn(out: TextIO, turn: Turn) -> None:
    """Write one line and make sure that it is on its way to the disk."""
    said = {"text": turn.text} if turn.dropped is None else {"dropped": turn.dropped}
    journal.append_row(out, {"id": turn.id, **said})


def _parse(row: object) -> Turn:
    if not isinstance(row, dict):
        raise TypeError("not an object")
    name = journal.text(row["id"])
    if "dropped" in row:
        return Turn(name, dropped=journal.text(row["dropped"]))
    return Turn(name, journal.text(row["text"]))
