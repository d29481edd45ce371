"""The steps of one answer, recorded while it is generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from d2sd.viz.nodes import Step, read_step, token_text

if TYPE_CHECKING:
    from d2sd.runtime.decode import StepTrace
    from d2sd.runtime.sequence import Output
    from d2sd.runtime.speculation.policy import Policy
    from d2sd.runtime.text import TextStream


@dataclass(frozen=True, slots=True)
class Turn:
    """One step, and the text it added to the answer."""

    step: Step
    pieces: tuple[str, ...]  # text of each token
    policy: str  # name of the policy that drafted it
    tau: float  # of the request up to here, by `SequenceStats`

    @property
    def tokens(self) -> list[tuple[str, str]]:
        """(source, text) of each token of the answer; the source of one that ends it has ` end` behind it."""
        sources: list[str] = [node.source for node in self.step.gained]
        sources[-1] += " end" * self.step.end
        return list(zip(sources, self.pieces, strict=True))


class Recording:
    """One answer, built from every output of its request. Keeps no tensor of a trace."""

    def __init__(self, prompt: str, token: Callable[[list[int]], str], stream: TextStream) -> None:
        """`token` decodes token ids, special tokens included; `stream` decodes the answer as the engine does."""
        self.prompt = prompt
        self.turns: list[Turn] = []
        self.policies: dict[str, Policy] = {}  # the policies of its steps, by name, in order of first use
        self._show = token_text(token)
        self._stream = stream
        self._begun = perf_counter()
        self.seconds = 0.0  # from here to the last step
        self._room = 0  # characters output by the engine that are not assigned to a piece yet

    def add(self, trace: StepTrace, output: Output) -> None:
        """Record one step of the request."""
        if not output.tokens:  # the request failed
            return
        kept = None if output.finish is None else len(output.tokens)
        step = read_step(trace, trace.sequences.index(output.sequence), self._show, kept)
        if output.finish == "stop" and output.sequence.ends_at(output.tokens[-1]):
            step = replace(step, end=True)
        self.seconds = perf_counter() - self._begun
        self.policies.setdefault(trace.policy.name, trace.policy)
        pieces = [self._stream.feed(token) for token in output.tokens]
        if output.finish is not None:
            pieces[-1] += self._stream.flush()
        self.turns.append(Turn(step, tuple(pieces), trace.policy.name, output.sequence.stats.tau))
        self._room += len(output.text)
        if output.finish is not None:
            self._cut()

    @property
    def best(self) -> int:
        """Index of the turn with the most tokens; ties go to the first."""
        return max(range(len(self.turns)), key=lambda i: len(self.turns[i].pieces))

    def _cut(self) -> None:
        """Remove a stop string and the text after it, which are not part of the answer."""
        for i, turn in enumerate(self.turns):
            pieces = []
            for piece in turn.pieces:
                pieces.append(piece[: self._room])
                self._room -= len(pieces[-1])
            self.turns[i] = replace(turn, pieces=tuple(pieces))
