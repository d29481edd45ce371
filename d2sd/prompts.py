"""Prompt files: JSONL of {"id": ..., "turns": [user turn, ...]}, or of documents that prompts are made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from d2sd.errors import D2SDError
from d2sd.io import parse_json, read_text

#: Prompts written for d2sd, for smoke tests and calibration.
OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")
#: Largest prompt file; a larger set must be split.
_MAX_BYTES = 1 << 30


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """(id, first user turn) of every line of a JSONL file of {id, turns}; raises D2SDError naming file and line."""
    return [(name, turns[0]) for name, turns in read_turns(path)]


def read_turns(path: Path) -> list[tuple[str, list[str]]]:
    """(id, all user turns) of every line of a JSONL file of {id, turns}; raises D2SDError naming file and line."""
    prompts = []
    for where, row in read_rows(path):
        turns = row.get("turns")
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise D2SDError(
                "Not a prompt: `turns` must be a list of strings.",
                where=where,
                found=turns,
                expected='{"id": "…", "turns": ["…"]}',
            )
        prompts.append((_id(row, where), turns))
    return prompts


def last_prompts(path: Path, exclude: Path | None, count: int) -> list[str]:
    """The last `count` prompts whose ids are not in the file `exclude`; raises D2SDError if none is left."""
    seen = {_id(row, where) for where, row in read_rows(exclude)} if exclude else set[str]()
    fresh = [text for name, text in read_prompts(path) if name not in seen][-count:]
    if not fresh:
        raise D2SDError("No prompt is left.", where=path, fix="name other prompts, or exclude fewer")
    return fresh


def read_documents(path: Path) -> list[tuple[str, dict[str, str]]]:
    """(id, other fields) of every line of a JSONL file of {id, ...}; raises D2SDError naming file and line."""
    documents = []
    for where, row in read_rows(path):
        fields = {key: text for key, text in row.items() if key != "id"}
        if not fields or not all(isinstance(text, str) for text in fields.values()):
            raise D2SDError(
                "Not a document: its fields must be texts.",
                where=where,
                found=fields,
                expected='{"id": "…", "text": "…"}',
            )
        documents.append((_id(row, where), fields))
    return documents


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, object) of every line that is not blank."""
    fix = "correct the path; `d2sd data` copies the public sets below data/, or says how to make them"
    text = read_text(path, what="prompt file", max_bytes=_MAX_BYTES, fix=fix)
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: a string may hold other line separators
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise D2SDError("Not a prompt: not JSON.", where=where, found=f"{line[:80]} ({error})") from None
        if not isinstance(row, dict):
            raise D2SDError("Not a prompt: not a JSON object.", where=where, found=line[:80], expected='{"id": …}')
        yield where, row


def _id(row: dict[str, Any], where: str) -> str:
    name = row.get("id")
    if not isinstance(name, (str, int)) or isinstance(name, bool):
        raise D2SDError("Not a prompt: `id` must be a string or an integer.", where=where, found=name)
    return str(name)
