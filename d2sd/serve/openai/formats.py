"""Answers as OpenAI's objects: whole, and as the chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from d2sd.runtime.sequence import Output
    from d2sd.serve.openai.generation import Choice, Generation


class Format(ABC):
    """The objects of one response."""

    prefix: str
    object: str
    chunk_object: str

    def __init__(self, model: str, fingerprint: str, token_ids: bool) -> None:
        self._token_ids = token_ids
        self._head = {
            "id": f"{self.prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The response that is not streamed."""
        choices = [self._common(choice) | self.choice(choice) for choice in generation.choices]
        return self._head | {"object": self.object, "choices": choices, "usage": generation.usage()}

    def chunk(self, *choices: dict[str, Any], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """One event of a stream."""
        return self._head | {"object": self.chunk_object, "choices": list(choices), "usage": usage}

    def _common(self, choice: Choice) -> dict[str, Any]:
        """Fields of every choice; `seed` and `token_ids` are extensions."""
        ids = {"token_ids": choice.tokens} if self._token_ids else {}
        return {"index": choice.index, "finish_reason": choice.finish, "logprobs": None, "seed": choice.seed} | ids

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, Any]:
        """The fields of a whole answer."""

    @abstractmethod
    def first(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """The chunks of a choice before its first output."""

    @abstractmethod
    def delta(self, choice: Choice, output: Output) -> dict[str, Any]:
        """The fields that an output adds to its chunk."""

    def deltas(self, choice: Choice, output: Output) -> Iterator[dict[str, Any]]:
        """The chunks of an output; none if it released neither text nor an end."""
        if output.text or output.finish is not None or (self._token_ids and output.tokens):
            ids = {"token_ids": list(output.tokens)} if self._token_ids else {}
            end = {"finish_reason": output.finish, "logprobs": None}
            seed = {"seed": choice.seed} if output.finish is not None else {}
            yield self.chunk({"index": choice.index} | end | seed | ids | self.delta(choice, output))


class ChatFormat(Format):
    """chat.completion and chat.completion.chunk."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, choice: Choice) -> dict[str, Any]:
        """The assistant's message."""
        return {"message": {"role": "assistant", "content": "".join(choice.text), "refusal": None}}

    def first(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """The role."""
        delta = {"role": "assistant", "content": ""}
        yield self.chunk({"index": choice.index, "delta": delta, "finish_reason": None, "logprobs": None})

    def delta(self, choice: Choice, output: Output) -> dict[str, Any]:
        """The text."""
        return {"delta": {"content": output.text} if output.text else {}}


class CompletionFormat(Format):
    """text_completion, whole and streamed."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def choice(self, choice: Choice) -> dict[str, Any]:
        """The text."""
        return {"text": "".join(choice.text)}

    def first(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """Nothing."""
        return iter(())

    def delta(self, choice: Choice, output: Output) -> dict[str, Any]:
        """The text."""
        return {"text": output.text}
