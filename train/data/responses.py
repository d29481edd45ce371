"""Training sequences: a prompt and the answer the target itself gave, one JSON object a line.

The drafter learns to imitate the target, so answers always come from the target. They are appended as they finish, by
each process to its own `answers.jsonl`, `answers-1.jsonl`, ..., so an interrupted run resumes from what is there. A
prompt that gave nothing to train on leaves {id, dropped: why}, so that it is not asked again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from d2sd.errors import D2SDError
from d2sd.train.data import jsonl as journal

KIND = "answers"
#: Why an answer of fewer than two tokens is dropped: nothing follows its anchor. Older files mark every drop so.
EMPTY = "empty answer"


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids of a rendered prompt and of what the target answered (its stop token included, if it came)."""

    id: str
    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True, slots=True)
class Dropped:
    """What was asked and gave nothing to train on, and why."""

    id: str
    reason: str


def read_answers(path: Path, *, vocab_size: int, max_tokens: int | None = None) -> list[Answer]:
    """Every answer in `path`, a file or the folder of every process's; lines cut short and dropped ones are left out.

    Raises:
        D2SDError: no answer at all, or naming file and line: one that is none, the second of an id, an id outside the
            vocabulary (another tokenizer's data), more than `max_tokens` with the prompt's (another recipe's).
    """
    answers = []
    for where, answer in _rows(path):
        if isinstance(answer, Dropped):
            continue
        tokens = answer.prompt_ids + answer.answer_ids
        if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
            raise D2SDError(
                "answers were made with another tokenizer",
                where=where, found=f"token id {wrong[0]}", expected=f"ids below {vocab_size}",
            )  # fmt: skip
        if max_tokens is not None and len(tokens) > max_tokens:
            raise D2SDError(
                "a sequence is longer than the recipe allows",
                where=where, found=f"{answer.id}: {len(tokens)} tokens", expected=f"at most {max_tokens}",
                fix="raise data.max_prompt_tokens or data.max_new_tokens again, or delete the line",
            )  # fmt: skip
        answers.append(answer)
    if not answers:
        raise D2SDError(
            "no usable answer", where=path, expected="answers of at least two tokens",
            fix="let d2sd train generate them",
        )  # fmt: skip
    return answers


def finished_ids(path: Path) -> dict[str, str | None]:
    """What need not be asked again: id -> why it was dropped, None where it was answered."""
    return {row.id: row.reason if isinstance(row, Dropped) else None for _, row in _rows(path)}


def answers_to(prompts: Mapping[str, Sequence[int]], answers: Iterable[Answer]) -> list[Answer]:
    """The answers to `prompts` (id -> token ids) in their order; answers to others are left out.

    Raises D2SDError where a prompt is no longer the one that was answered.
    """
    found = {answer.id: answer for answer in answers}
    chosen = [found[name] for name in prompts if name in found]
    for answer in chosen:
        if answer.prompt_ids != list(prompts[answer.id]):
            raise D2SDError(
                "a prompt changed since it was answered", where="data.prompts", found=answer.id,
                fix="restore its file or the target's chat template, or train into another --work folder",
            )  # fmt: skip
    return chosen


def append_answer(out: TextIO, name: str, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
    """Write one line and make sure that it is on its way to the disk; an answer without two tokens is dropped."""
    if len(answer_ids) < 2:
        append_drop(out, name, EMPTY)
    else:
        journal.append_row(out, {"id": name, "prompt_ids": list(prompt_ids), "answer_ids": list(answer_ids)})


def append_drop(out: TextIO, name: str, reason: str) -> None:
    """Write that this prompt is done with, and why there is nothing to train on."""
    journal.append_row(out, {"id": name, "dropped": reason})


def _rows(path: Path) -> Iterator[tuple[str, Answer | Dropped]]:
    return journal.read_rows(path, KIND, _parse, "id and prompt_ids, answer_ids or dropped")


def _parse(row: object) -> Answer | Dropped:
    if not isinstance(row, dict):
        raise TypeError("not an object")
    name = journal.text(row["id"])
    if "dropped" in row:
        return Dropped(name, journal.text(row["dropped"]))
    answer = Answer(name, row["prompt_ids"], row["answer_ids"])
    if not all(type(token) is int for token in answer.prompt_ids + answer.answer_ids):
        raise TypeError("token ids are integers")
    if answer.answer_ids and not answer.prompt_ids:
        raise ValueError("an answer to nothing")
    return answer if len(answer.answer_ids) >= 2 else Dropped(name, EMPTY)
