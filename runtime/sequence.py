"""State of one request in the engine; the comment of a field names what changes it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal

from d2sd.errors import D2SDError, GenerationError
from d2sd.runtime.request import Request
from d2sd.runtime.stats import SequenceStats
from d2sd.runtime.text import TextStream

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Output:
    """The tokens and text that one request gained in one step."""

    sequence: Sequence
    tokens: tuple[int, ...]
    text: str  # released in this step; "" without a decoder
    finish: FinishReason | None


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. The last token is the *anchor*: chosen, but not computed yet. Everything before it is context.

    The last prompt token is the first anchor, so the prefill needs no logits and every generated token comes out of the
    same decode step.
    """

    id: int
    request: Request
    tokens: list[int]  # prompt and answer; grows in append
    text: TextStream | None = None  # fed in append
    cached: int = 0  # leading tokens whose K/V is in the pools; set by prefill and append, reset by preemption
    pages: list[int] = field(default_factory=list)  # set by the scheduler
    finish: FinishReason | None = None  # set by append, cancel and fail
    error: D2SDError | None = None  # set by fail
    stats: SequenceStats = field(default_factory=SequenceStats)

    @property
    def anchor(self) -> int:
        return self.tokens[-1]

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def pending(self) -> int:
        """Context tokens still to be prefilled."""
        return len(self.tokens) - 1 - self.cached

    def fail(self, error: Exception) -> Output:
        """End the answer with an error."""
        self.finish, self.error = "error", GenerationError.of(error)
        return Output(self, (), "", "error")

    def append(self, tokens: SequenceOf[int]) -> Output:
        """Append the tokens that a step committed, up to the one that ends the answer; the rest are dropped."""
        self.cached += len(tokens)
        taken, text = [], ""
        for token in tokens:
            taken.append(token)
            self.tokens.append(token)
            if token in self.request.stop_tokens:
                self.finish = "stop"
            elif self.text is not None:
                text += self.text.feed(token)
                if self.text.stopped:
                    self.finish = "stop"
            if self.finish is None and len(self.tokens) >= len(self.request.prompt) + self.request.max_new_tokens:
                self.finish = "length"
            if self.finish is not None:
                break
        if self.finish is not None and self.text is not None:
            text += self.text.flush()
            if self.text.stopped:  # the last characters, held back until now, complete a stop string
                self.finish = "stop"
        return Output(self, tuple(taken), text, self.finish)
