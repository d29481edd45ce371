"""Workloads: conversations from d2sd's own prompts, alone, behind a shared system prompt, or of several turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from d2sd.prompts import OWN_PROMPTS, read_prompts

#: Number of tokens of a text.
Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Conversation:
    """User turns, each sent with all that came before it; seeds are successive."""

    turns: list[str]
    seed: int
    system: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)  # of every request

    def first_messages(self) -> list[dict[str, str]]:
        """The messages before the first user turn."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]


def own_prompts(count: int) -> list[str]:
    """`count` of d2sd's own prompts, repeated if there are not enough."""
    prompts = [text for _, text in read_prompts(OWN_PROMPTS)]
    return [prompts[i % len(prompts)] for i in range(count)]


def single(count: int, parameters: dict[str, Any]) -> list[Conversation]:
    """One question each."""
    return [Conversation([text], seed, None, parameters) for seed, text in enumerate(own_prompts(count))]


def shared_prefix(
    count: int, parameters: dict[str, Any], tokens: int, length: Count, session: int
) -> list[Conversation]:
    """One question each, behind the same system prompt of at least `tokens` tokens.

    `session` is in its first words: another session's is not in the prefix cache.
    """
    rules, number = [f"Session {session}. You answer briefly. Follow these rules."], 0
    topics = own_prompts(24)
    while length("\n".join(rules)) < tokens:
        number += 1
        rules.append(f"Rule {number}: if the user asks \u201c{topics[number % 24]}\u201d, answer in {number} words.")
    system = "\n".join(rules)
    return [Conversation([text], seed, system, parameters) for seed, text in enumerate(own_prompts(count))]


def multi_turn(count: int, parameters: dict[str, Any], turns: int, session: int) -> list[Conversation]:
    """Chats of `turns` questions; each request sends the whole history. `session` is as in `shared_prefix`."""
    prompts, system = own_prompts(count * turns), f"Session {session}. You answer briefly."
    return [Conversation(prompts[i * turns : (i + 1) * turns], i * turns, system, parameters) for i in range(count)]
