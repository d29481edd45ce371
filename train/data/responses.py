"""Training sequences: a prompt and the target's own response to it, one JSON object a line.

The drafter learns to imitate the target, so responses always come from the target. They are appended as they finish,
by each process to its own `answers.jsonl`, `answers-1.jsonl`, ..., so an interrupted run resumes from them. A prompt
without a usable response is recorded as {id, dropped: reason}, so that it is not run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pydantic import Field, model_validator

from d2sd.errors import D2SDError
from d2sd.train.data import jsonl

KIND = "answers"
#: Reason for dropping a response of fewer than two tokens: no token follows its anchor. Older files have no other.
EMPTY = "empty response"


@dataclass(frozen=True, slots=True)
class Response:
    """Token ids of a rendered prompt and of the target's response (with its stop token, if one was generated)."""

    id: str
    prompt_ids: list[int]
    response_ids: list[int]


class ResponseLine(jsonl.Named):
    """A line on disk: a response, or why it was dropped."""

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
        """Why it is not trained on; None if it is."""
        return self.dropped or (EMPTY if len(self.answer_ids) < 2 else None)


def read_responses(path: Path, *, vocab_size: int, max_tokens: int | None = None) -> list[Response]:
    """Every response in `path`, a file or the folder with the files of all processes; skips cut and dropped lines.

    Raises:
        D2SDError: no response at all; or, with file and line: a malformed line, a repeated id, a token id outside the
            vocabulary (another tokenizer), more than `max_tokens` tokens with the prompt (another recipe).
    """
    responses = []
    for where, line in _lines(path):
        if line.reason is not None:
            continue
        tokens = line.prompt_ids + line.answer_ids
        if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
            raise D2SDError(
                "the responses were tokenized with another tokenizer",
                where=where,
                found=f"token id {wrong[0]}",
                expected=f"ids below {vocab_size}",
            )
        if max_tokens is not None and len(tokens) > max_tokens:
            raise D2SDError(
                "a training sequence is longer than the recipe allows",
                where=where,
                found=f"{line.id}: {len(tokens)} tokens",
                expected=f"at most {max_tokens}",
                fix="raise data.max_prompt_tokens or data.max_new_tokens again, or delete the line",
            )
        responses.append(Response(line.id, line.prompt_ids, line.answer_ids))
    if not responses:
        raise D2SDError(
            "no usable response",
            where=path,
            expected="responses of at least two tokens",
            fix="generate them with d2sd train",
        )
    return responses


def finished_ids(path: Path) -> dict[str, str | None]:
    """Prompts that need not be run again: id -> why the response was dropped, None if it was not."""
    return {line.id: line.reason for _, line in _lines(path)}


def match_responses(prompts: Mapping[str, Sequence[int]], responses: Iterable[Response]) -> list[Response]:
    """The responses to `prompts` (id -> token ids) in their order; responses to other prompts are left out.

    Raises D2SDError if a prompt differs from the one that was answered.
    """
    by_id = {response.id: response for response in responses}
    chosen = [by_id[name] for name in prompts if name in by_id]
    for response in chosen:
        if response.prompt_ids != list(prompts[response.id]):
            raise D2SDError(
                "a prompt changed since it was answered",
                where="data.prompts",
                found=response.id,
                fix="restore its file or the target's chat template, or train into another --work folder",
            )
    return chosen


def append_response(out: TextIO, name: str, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> None:
    """Append and flush one line; a response of fewer than two tokens is dropped."""
    if len(response_ids) < 2:
        jsonl.append_row(out, {"id": name, "dropped": EMPTY})
    else:
        jsonl.append_row(out, {"id": name, "prompt_ids": list(prompt_ids), "answer_ids": list(response_ids)})


def _lines(path: Path) -> Iterator[tuple[str, ResponseLine]]:
    return jsonl.read_rows(path, KIND, ResponseLine)
