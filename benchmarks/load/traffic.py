"""Sends requests at a constant concurrency (closed loop), or at random times of a given rate (open loop)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from benchmarks.load.client import Client, Reply
from benchmarks.load.workloads import Conversation


async def closed_loop(
    client: Client, conversations: Sequence[Conversation], concurrency: int
) -> tuple[list[Reply], float]:
    """`concurrency` users, each of whom starts the next conversation when the last one has ended.

    Returns the replies in the order of the conversations and their turns, and the seconds of the whole.
    """
    waiting = list(reversed(list(enumerate(conversations))))
    replies: dict[int, list[Reply]] = {}

    async def user() -> None:
        while waiting:
            index, conversation = waiting.pop()
            replies[index] = await converse(client, conversation)

    begun = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(concurrency)))
    return [reply for index in sorted(replies) for reply in replies[index]], time.perf_counter() - begun


async def open_loop(
    client: Client, conversations: Sequence[Conversation], rate: float, seed: int = 0
) -> tuple[list[Reply], float]:
    """Conversations begin at the times of a Poisson process of `rate` a second, whether or not others have ended."""
    draw, start = random.Random(seed), 0.0
    starts = []
    for _ in conversations:
        starts.append(start)
        start += draw.expovariate(rate)

    async def at(moment: float, conversation: Conversation) -> list[Reply]:
        await asyncio.sleep(moment - (time.perf_counter() - begun))
        return await converse(client, conversation)

    begun = time.perf_counter()
    groups = await asyncio.gather(*map(at, starts, conversations))
    return [reply for group in groups for reply in group], time.perf_counter() - begun


async def converse(client: Client, conversation: Conversation) -> list[Reply]:
    """Ask the turns one after the other; a reply that failed ends the conversation."""
    messages, replies = conversation.first_messages(), []
    for number, turn in enumerate(conversation.turns):
        messages = [*messages, {"role": "user", "content": turn}]
        body = conversation.parameters | {"messages": messages, "seed": conversation.seed + number}
        replies.append(await client.ask(body))
        if not replies[-1].complete:
            break
        messages.append({"role": "assistant", "content": replies[-1].text})
    return replies
