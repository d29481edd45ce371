"""Hostile requests by class: what is sent, and how its answer is judged."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `raw`: its body are bytes for the socket, in pieces of (seconds to wait before, bytes)."""

    body: bytes = b""
    path: str = COMPLETIONS
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: dict(_JSON))
    raw: tuple[tuple[float, bytes], ...] = ()
    leaves: float | None = None  # seconds after which the client resets the connection, answered or not

    @staticmethod
    def of(body: Any, path: str = COMPLETIONS, leaves: float | None = None) -> Case:
        """A request with a body in JSON."""
        return Case(json.dumps(body).encode(), path, leaves=leaves)

    def asked(self) -> dict[str, Any]:
        """The body's mapping; an empty one if it is none."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Scene:
    """The server as a hostile client knows it."""

    vocab: int  # tokens of the vocabulary
    context: int  # tokens of the longest request
    answer: int = 4  # tokens of the answers that hostile requests ask for

    def completion(self, draw: random.Random, **fields: Any) -> dict[str, Any]:
        """A harmless completion, to which a class adds its poison; its seed makes the answer repeatable."""
        prompt = " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 6)))
        sampling = draw.choice(({}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 30}))
        return {"prompt": prompt, "max_tokens": self.answer, "seed": draw.randrange(2**32), **sampling, **fields}

    def chat(self, draw: random.Random, **fields: Any) -> dict[str, Any]:
        """The case as a conversation."""
        body = self.completion(draw)
        turn = {"role": "user", "content": body.pop("prompt")}
        return {**body, "messages": [turn], **fields}


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of hostile requests.

    `at_once` of them run together. One that `fills` the batch or computes long prompts by right makes its neighbours
    queue, and may itself take long: it is judged by whether they are served within the timeout of a request.
    """

    name: str
    make: Callable[[random.Random, Scene], Case]
    at_once: int = 4
    fills: bool = False

    def case(self, seed: int, number: int, scene: Scene) -> Case:
        """The request of a seed and a number."""
        return self.make(random.Random(f"{seed}/{self.name}/{number}"), scene)


#: Words of prompts.
WORDS = (
    *("the", "cat", "writes", "seven", "letters", "about", "rain", "in", "Paris", "why", "?", "def", "f(x):"),
    *("return", "w5", "w7", "a", "b", "1", "42", "é", "好", "🙂", "\n"),
)


def size(draw: random.Random, least: int, most: int) -> int:
    """A number between two bounds, each order of magnitude as likely as the others."""
    return int(least * (most / least) ** draw.random())


def letters(draw: random.Random, count: int, alphabet: str = "abcdefgh ") -> str:
    """A random text of `count` characters."""
    return "".join(draw.choices(alphabet, k=count))
