"""Training sequences: a prompt and the response the target itself gave, one JSON object a line.

The drafter learns to imitate the target, so responses always come from the target. They are appended as they finish,
by each process to its own `answers.jsonl`, `answers-1.jsonl`, ..., so an interrupted run resumes from what is there. A
prompt without a usable response leaves {id, dropped: reason}, so that it is not run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pydantic import ConfigDict, Field, model_validator

from d2sd.errors import D2SDError
from d2sd.train.data import jsonl

KIND = "answers"
#: Why a response of fewer than two tokens is dropped: nothing follows its anchor. Older files mark every drop so.
EMPTY = "empty answer"


@dataclass(frozen=True, slots=True)
class Response:
    """Token ids of a rendered prompt and of the target's response (its stop token included, if it came)."""

    id: str
    prompt_ids: list[int]
    response_ids: list[int]


class ResponseLine(jsonl.Named):
    """A line on disk: a response, or why there is none to train on."""

    model_config = ConfigDict(strict=True)

    prompt_ids: list[int] = Field(default=[])
    answer_ids: list[int] = Field(default=[])
    dropped: str = ""

    @model_validator(mode="after")
    def _one_of_both(self) -> ResponseLine:
        if "dropped" not in self.model_fields_set:
            if missing := {"prompt_ids", "answer_ids"} - self.model_fields_set:
                raise ValueError(f"neither dropped nor {' and '.join(sorted(missing))}")
            if self.answer_ids and not self.prompt_ids:
                raise ValueError("a response to an empty prompt")
        return self

    @property
    def reason(self) -> str | None:
        """Why it is not trained on; None where it is."""
        return self.dropped or (EMPTY if len(self.answer_ids) < 2 else None)


def read_responses(path: Path, *, vocab_size: int, max_tokens: int | None = None) -> list[Response]:
    """Every response in `path`, a file or the folder of every process's; cut lines and dropped ones are left out.

    Raises:
        D2SDError: no response at all, or naming file and line: a malformed one, the second of an id, an id outside the
            vocabulary (another tokenizer's data), more than `max_tokens` with the prompt's (another recipe's).
    """
    responses = []
    for where, line in _lines(path):
        if line.reason is not None:
            continue
        tokens = line.prompt_ids + line.answer_ids
        if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
            raise D2SDError(
                "answers were made with another tokenizer",
                where=where, found=f"token id {wrong[0]}", expected=f"ids below {vocab_size}",
            )  # fmt: skip
        if max_tokens is not None and len(tokens) > max_tokens:
            raise D2SDError(
                "a sequence is longer than the recipe allows",
                where=where, found=f"{line.id}: {len(tokens)} tokens", expected=f"at most {max_tokens}",
                fix="raise data.max_prompt_tokens or data.max_new_tokens again, or delete the line",
            )  # fmt: skip
        responses.append(Response(line.id, line.prompt_ids, line.answer_ids))
    if not responses:
        raise D2SDError(
            "no usable answer", where=path, expected="answers of at least two tokens",
            fix="let d2sd train generate them",
        )  # fmt: skip
    return responses


def finished_ids(path: Path) -> dict[str, str | None]:
    """Prompts that need not be run again: id -> why its response was dropped, None where there is one."""
    return {line.id: line.reason for _, line in _lines(path)}


def match_responses(prompts: Mapping[str, Sequence[int]], responses: Iterable[Response]) -> list[Response]:
    """The responses to `prompts` (id -> token ids) in their order; responses to other prompts are left out.

    Raises D2SDError where a prompt is no longer the one that was answered.
    """
    found = {response.id: response for response in responses}
    chosen = [found[name] for name in prompts if name in found]
    for response in chosen:
        if response.prompt_ids != list(prompts[response.id]):
            raise D2SDError(
                "a prompt changed since it was answered", where="data.prompts", found=response.id,
                fix="restore its file or the target's chat template, or train into another --work folder",
            )  # fmt: skip
    return chosen


def append_response(out: TextIO, name: str, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> None:
    """Append and flush one line; a response of fewer than two tokens is dropped."""
    if len(response_ids) < 2:
        append_drop(out, name, EMPTY)
    else:
        jsonl.append_row(out, {"id": name, "prompt_ids": list(prompt_ids), "answer_ids": list(response_ids)})


def append_drop(out: TextIO, name: str, reason: str) -> None:
    """Record that this prompt is done with, and why there is nothing to train on."""
    jsonl.append_row(out, {"id": name, "dropped": reason})


def _lines(path: Path) -> Iterator[tuple[str, ResponseLine]]:
    return jsonl.read_rows(path, KIND, ResponseLine)
