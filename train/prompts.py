"""Which prompts are answered for training: those of files, and user turns that the target writes itself."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from d2sd.errors import D2SDError
from d2sd.train_recipe import Data


@dataclass(frozen=True, slots=True)
class Job:
    """A text to work on: a whole user turn to answer, or the opening of one that the target is to write first."""

    id: str
    text: str
    written: bool  # False: `text` is an opening


def plan_prompts(files: Iterable[tuple[Sequence[tuple[str, str]], int | None]], data: Data, seed: int = 0) -> list[Job]:
    """All jobs in one seeded shuffle, so that any first part of them is a fair sample.

    `files` holds for each prompt file its (id, user turn) pairs and how many are wanted. Raises
    D2SDError where an id is not unique.
    """
    draw = random.Random(seed)  # noqa: S311  (a shuffle, not a secret)
    jobs = []
    for prompts, count in files:
        chosen = draw.sample(list(prompts), min(count or len(prompts), len(prompts)))
        jobs += [Job(name, text, written=True) for name, text in chosen]
    if data.self_written is not None:
        openings = data.self_written.openings
        jobs += [Job(f"self/{i}", draw.choice(openings), written=False) for i in range(data.self_written.count)]
    if repeated := [name for name, times in Counter(job.id for job in jobs).items() if times > 1]:
        raise D2SDError("two prompts have the same id", where="data.prompts", found=repeated[0])
    draw.shuffle(jobs)
    return jobs
