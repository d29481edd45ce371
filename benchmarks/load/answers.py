"""Answers of a server against those of the Python API, for the same seeds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.load.client import connect
from benchmarks.load.traffic import closed_loop
from benchmarks.load.workloads import Conversation, own_prompts
from d2sd import LLM, SamplingParams
from d2sd.errors import D2SDError

#: Of the checked answers, in turn.
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40},
)


def reference(bundle: Path, count: int, max_tokens: int) -> list[tuple[Conversation, str]]:
    """Conversations of one turn and their answers by plain decoding in this process."""
    made = [
        Conversation([text], seed, None, SAMPLINGS[seed % len(SAMPLINGS)] | {"max_tokens": max_tokens})
        for seed, text in enumerate(own_prompts(count))
    ]
    messages = [[{"role": "user", "content": one.turns[0]}] for one in made]
    with LLM(bundle, policy="off") as llm:
        answers = llm.chat(messages, [SamplingParams(seed=one.seed, **one.parameters) for one in made])
    return [(one, answer.text) for one, answer in zip(made, answers, strict=True)]


def check_answers(bundle: Path, urls: Sequence[str], *, count: int = 6, max_tokens: int = 24) -> None:
    """Raise D2SDError unless every server gives the answers of plain decoding, `count` at a time."""
    if not urls:
        return
    expected = reference(bundle, count, max_tokens)

    async def ask(url: str) -> None:
        async with connect(url) as client:
            replies, _ = await closed_loop(client, [one for one, _ in expected], count)
        for (one, text), reply in zip(expected, replies, strict=True):
            if not reply.complete or reply.text != text:
                raise D2SDError(
                    "The server's answer is not that of LLM(...).", where=f"{url}, seed {one.seed}",
                    found=reply.error or reply.text, expected=text,
                )  # fmt: skip

    for url in urls:
        asyncio.run(ask(url))
