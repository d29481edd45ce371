"""Prompts for training: prompts read from files, and user turns written by the target itself.

There are two stages, because turns written by several processes finish in any order: first every turn is written to
disk, then all prompts are filtered together (`decontaminate.py`) in the order of the plan, and the rest are answered.
So the set of answered prompts depends on the recipe alone, however often the run was interrupted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from pydantic import model_validator

from d2sd.errors import D2SDError
from d2sd.train.data import jsonl
from d2sd.train_recipe import Data, SelfWritten

KIND = "turns"


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt: a complete user turn to answer, or the opening of one that the target completes first."""

    id: str
    text: str
    kind: SelfWritten | None = None  # how to complete `text`; None if it is a complete turn


class Turn(jsonl.Named):
    """A line on disk: a user turn that the target wrote, its opening included, or why it was dropped."""

    text: str | None = None
    dropped: str | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Turn:
        if (self.text is None) == (self.dropped is None):
            raise ValueError("expected either text or dropped")
        return self


def plan_prompts(files: Iterable[tuple[Sequence[tuple[str, str]], int | None]], data: Data) -> list[Job]:
    """All jobs in a random order, so that any prefix of them is a fair sample.

    `files` holds for each prompt file its (id, user turn) pairs and how many of them to use. The order depends on the
    ids alone: raising a count or adding a file adds jobs and never replaces existing ones.
    `self_written.count` is the number of turns tried, before filtering, so the plan is known before the target has
    run. Raises D2SDError if an id is not unique.
    """
    jobs = []
    for prompts, count in files:
        chosen = sorted(prompts, key=lambda prompt: order(prompt[0]))[:count]
        jobs += [Job(name, text) for name, text in chosen]
    for kind in data.self_written:
        names = [f"self/{kind.name}/{i}" for i in range(kind.count)]
        jobs += [Job(name, kind.openings[order(name) % len(kind.openings)], kind) for name in names]
    if repeated := [name for name, times in Counter(job.id for job in jobs).items() if times > 1]:
        raise D2SDError("two prompts have the same id", where="data.prompts", found=repeated[0])
    return sorted(jobs, key=lambda job: order(job.id))


def order(name: str) -> int:
    """A random number of 64 bits that the name determines."""
    return int.from_bytes(blake2b(f"0/{name}".encode(), digest_size=8).digest(), "big")


def take_turns(jobs: Sequence[Job], path: Path) -> tuple[list[Job], dict[str, str]]:
    """(jobs with every opening replaced by its turn in `path`, id -> why the turn was dropped).

    `path` is a file or the folder with the files of all processes. An opening without a turn yet stays an opening.
    Raises D2SDError for a damaged line, and for a turn that does not begin with its opening (from another recipe).
    """
    turns = {turn.id: (where, turn) for where, turn in jsonl.read_rows(path, KIND, Turn)}
    remaining, dropped = [], {}
    for job in jobs:
        if job.kind is None or job.id not in turns:
            remaining.append(job)
            continue
        where, turn = turns[job.id]
        if turn.text is None:
            dropped[job.id] = turn.dropped or ""
        elif turn.text.startswith(job.text):
            remaining.append(Job(job.id, turn.text))
        else:
            raise D2SDError(
                "a self-written turn begins with another opening",
                where=where,
                found=turn.text[:40],
                expected=job.text,
                fix="restore data.self_written.openings, or train into another --work folder",
            )
    return remaining, dropped
