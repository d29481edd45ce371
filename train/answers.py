"""Training sequences: a prompt and the answer the target itself gave, one JSON object a line.

The drafter learns to imitate the target, so answers always come from the target. The file is appended to as answers
finish, so an interrupted run resumes from what is there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from d2sd.errors import D2SDError


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids of a rendered prompt and of what the target answered (its stop token included, if it came).

    No answer at all marks a prompt that was dropped, so that it is not asked again.
    """

    id: str
    prompt_ids: list[int]
    answer_ids: list[int]


def read_answers(path: Path, *, vocab_size: int) -> list[Answer]:
    """Read every answer of at least two tokens, in file order; a line cut short by an interruption is left out.

    Raises:
        D2SDError: no such file, nothing in it, a line that is no answer, or an id outside the vocabulary (another
            tokenizer's data).
    """
    if not path.is_file():
        raise D2SDError("no answers to train on", where=path, fix="let d2sd train generate them")
    answers = []
    for number, answer in enumerate(_parse(_whole_lines(path), path), 1):
        tokens = answer.prompt_ids + answer.answer_ids
        if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
            raise D2SDError(
                "answers were made with another tokenizer",
                where=f"{path}:{number}", found=f"token id {wrong[0]}", expected=f"ids below {vocab_size}",
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
    whole = _whole_lines(path)
    ids = {answer.id for answer in _parse(whole, path)}
    os.truncate(path, len(whole))
    return ids


def _whole_lines(path: Path) -> bytes:
    data = path.read_bytes()
    return data[: data.rfind(b"\n") + 1]


def _parse(lines: bytes, path: Path) -> Iterator[Answer]:
    """One answer a line. Raises D2SDError naming file and line."""
    for number, line in enumerate(lines.split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            answer = Answer(row["id"], row["prompt_ids"], row["answer_ids"])
            if not isinstance(answer.id, str):
                raise TypeError("id is a string")
            if not all(type(token) is int for token in answer.prompt_ids + answer.answer_ids):
                raise TypeError("token ids are integers")
            if answer.answer_ids and not answer.prompt_ids:
                raise ValueError("an answer to nothing")
        except (ValueError, KeyError, TypeError) as error:
            raise D2SDError(
                "not an answer", where=f"{path}:{number}", found=repr(error), expected="id, prompt_ids, answer_ids"
            ) from None
        yield answer


def append_answer(out: TextIO, name: str, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
    """Write one line and make sure that it is on its way to the disk."""
    out.write(json.dumps({"id": name, "prompt_ids": list(prompt_ids), "answer_ids": list(answer_ids)}) + "\n")
    out.flush()
