"""Training sequences: a prompt and the answer the target itself gave, one JSON object a line.

The drafter learns to imitate the target, so answers always come from the target. The file is appended to as answers
finish, so an interrupted run resumes from what is there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from d2sd.errors import D2SDError


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids of a rendered prompt and of what the target answered (its stop token included, if it came)."""

    id: str
    prompt_ids: list[int]
    answer_ids: list[int]


def read_answers(path: Path, *, vocab_size: int) -> list[Answer]:
    """Read every answer of at least two tokens, in file order; a line cut short by an interruption is left out.

    Raises:
        D2SDError: no such file, nothing in it, a key missing, or an id outside the vocabulary (another tokenizer's
        data).
    """
    if not path.is_file():
        raise D2SDError(
            "no answers to train on", where=path, fix="generate them first: d2sd train RECIPE --stage answers"
        )
    answers = []
    lines = path.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            break  # the writer was stopped inside this line
        try:
            row = json.loads(line)
            answer = Answer(row["id"], row["prompt_ids"], row["answer_ids"])
        except (ValueError, KeyError, TypeError) as error:
            raise D2SDError(
                "not an answer", where=f"{path}:{number}", found=repr(error), expected="id, prompt_ids, answer_ids"
            ) from error
        largest = max(answer.prompt_ids + answer.answer_ids, default=0)
        if largest >= vocab_size:
            raise D2SDError(
                "answers were made with another tokenizer",
                where=f"{path}:{number}", found=f"token id {largest}", expected=f"ids below {vocab_size}",
            )  # fmt: skip
        if len(answer.answer_ids) >= 2:
            answers.append(answer)
    if not answers:
        raise D2SDError("no usable answer", where=path, expected="answers of at least two tokens")
    return answers


def finished_ids(path: Path) -> set[str]:
    """Ids of the answers already in `path`; a line cut short by an interruption is cut off the file."""
    if not path.is_file():
        return set()
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return {json.loads(line)["id"] for line in whole.splitlines()}


def append_answer(out: TextIO, name: str, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
    """Write one line and make sure that it is on its way to the disk."""
    out.write(json.dumps({"id": name, "prompt_ids": list(prompt_ids), "answer_ids": list(answer_ids)}) + "\n")
    out.flush()
