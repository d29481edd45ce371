"""Answers of a server against those of the Python API, for the same seeds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.load.client import Reply
from benchmarks.load.server import Server
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
    """Conversations of one turn with sampling of several kinds, and their answers by plain decoding."""
    made = [
        Conversation([text], seed, None, SAMPLINGS[seed % len(SAMPLINGS)] | {"max_tokens": max_tokens})
        for seed, text in enumerate(own_prompts(count))
    ]
    return list(zip(made, plain_answers(bundle, made), strict=True))


def plain_answers(bundle: Path, conversations: Sequence[Conversation]) -> list[str]:
    """The answers to conversations of one turn by plain decoding in this process."""
    messages = [[{"role": "user", "content": one.turns[0]}] for one in conversations]
    with LLM(bundle, policy="off") as llm:
        answers = llm.chat(messages, [SamplingParams(seed=one.seed, **one.parameters) for one in conversations])
    return [answer.text for answer in answers]


def check_answers(bundle: Path, servers: Sequence[Server], *, count: int = 6, max_tokens: int = 24) -> None:
    """Raise D2SDError unless every server gives the answers of plain decoding, `count` at a time."""
    if not servers:
        return
    expected = reference(bundle, count, max_tokens)

    async def ask(server: Server) -> list[Reply]:
        async with server.connect() as client:
            return (await closed_loop(client, [one for one, _ in expected], count))[0]

    for server in servers:
        compare(asyncio.run(ask(server)), [text for _, text in expected], server.url)


def compare(replies: Sequence[Reply], texts: Sequence[str], where: str) -> None:
    """Raise D2SDError unless the replies are complete and have these texts."""
    for number, (reply, text) in enumerate(zip(replies, texts, strict=True)):
        if not reply.complete or reply.text != text:
            raise D2SDError(
                "The server's answer is not that of LLM(...).",
                where=f"{where}, seed {number}",
                found=reply.error or reply.text,
                expected=text,
            )
