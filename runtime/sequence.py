"""State of one request in the engine: plain data; whoever changes a field is named beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from d2sd.runtime.request import Request
from d2sd.runtime.stats import SequenceStats
from d2sd.runtime.text import TextStream

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(slots=True, eq=False)
class Sequence:
    """The last token is the *anchor*: chosen, but not computed yet. Everything before it is context.

    The last prompt token is the first anchor, so the prefill needs no logits and every generated token comes out of the
    same decode step.
    """

    id: int
    request: Request
    tokens: list[int]  # prompt and answer; grows in retire
    text: TextStream | None = None  # fed in retire
    cached: int = 0  # leading tokens whose K/V is in the pools; set by prefill and retire, reset by preemption
    pages: list[int] = field(default_factory=list)  # the scheduler's
    finish: FinishReason | None = None  # set by retire and cancel
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
