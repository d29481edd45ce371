"""Prompt files: JSONL of {"id": ..., "turns": [user turn, ...]}."""

from __future__ import annotations

import json
from pathlib import Path

from d2sd.errors import D2SDError

#: Prompts of our own writing, for smoke tests and calibration.
OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """(id, first user turn) of every line of a JSONL file of {id, turns}; raises D2SDError naming file and line."""
    return [(name, turns[0]) for name, turns in read_turns(path)]


def read_turns(path: Path) -> list[tuple[str, list[str]]]:
    """(id, all user turns) of every line of a JSONL file of {id, turns}; raises D2SDError naming file and line."""
    try:
        lines = path.read_text("utf-8").split("\n")  # not splitlines: a string may hold other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise D2SDError("the prompts cannot be read", where=path, found=error) from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            first, *others = row["turns"]
            prompts.append((str(row["id"]), [str(first), *map(str, others)]))
        except (ValueError, KeyError, TypeError):
            raise D2SDError(
                "not a prompt", where=f"{path}:{number}", found=line[:80], expected='{"id": "…", "turns": ["…"]}'
            ) from None
    return prompts
