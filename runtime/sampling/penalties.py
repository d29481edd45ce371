"""Repetition, presence and frequency penalties: functions of the tokens before a row, the path of its node included.

The repetition penalty counts prompt and answer, the other two the answer alone, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.thought import Markers

if TYPE_CHECKING:
    from d2sd.runtime.sampling.bias import Entries

# Shape letters: B requests, V vocabulary.


@dataclass(slots=True)
class Counts:
    """How often each token occurred in a text that only grows: each step reads what is new in it."""

    read: int = 0  # leading tokens of the text that are counted
    seen: Tensor | None = None  # [V] bool, on the device, as `count`: a row of `Penalties`; None: nothing is counted
    count: Tensor | None = None  # [V] fp32


class Text(NamedTuple):
    """Token counts on which a request's sampling depends besides its parameters."""

    tokens: SequenceOf[int]  # prompt and answer so far
    prompt_len: int
    stop_tokens: frozenset[int] = frozenset()
    entries: Entries | None = None  # those of its biases, if they have been made
    counts: Counts | None = None  # of its tokens, kept from step to step; None: all tokens are counted
    markers: Markers | None = None  # around a thought


NO_TEXT = Text((), 0)


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of a batch, and how often each token occurred."""

    repetition: Tensor  # [B, 1] fp32, 1 where off
    presence: Tensor  # [B, 1] fp32, 0 where off
    frequency: Tensor  # [B, 1] fp32, 0 where off
    seen: Tensor  # [B, V] bool: in the prompt or in the answer
    count: Tensor  # [B, V] fp32, in the answer

    @staticmethod
    def of(
        params: SequenceOf[SamplingParams], texts: SequenceOf[Text], vocab_size: int, device: str
    ) -> Penalties | None:
        """None where no request has a penalty. The texts' `counts` go on from here."""
        if not any(p.has_penalty for p in params):
            return None
        known = [text.counts or Counts() for text in texts]
        flat, answered = list[int](), list[float]()  # new tokens as places in [B, V], and 1 for those of answers
        for row, (request_params, text, counts) in enumerate(zip(params, texts, known, strict=True)):
            if request_params.has_penalty:
                flat += [row * vocab_size + token for token in text.tokens[counts.read :]]
                answered += [0.0] * (min(text.prompt_len, len(text.tokens)) - counts.read)
                answered += [1.0] * (len(flat) - len(answered))
        places = torch.tensor(flat, dtype=torch.long, device=device)
        empty = torch.zeros(vocab_size, device=device)
        seen = torch.stack([empty.bool() if counts.seen is None else counts.seen for counts in known])
        count = torch.stack([empty if counts.count is None else counts.count for counts in known])
        seen.view(-1).scatter_(0, places, True)
        count.view(-1).scatter_add_(0, places, torch.tensor(answered, dtype=torch.float32, device=device))
        for row, (text, counts) in enumerate(zip(texts, known, strict=True)):
            counts.read, counts.seen, counts.count = len(text.tokens), seen[row], count[row]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        return Penalties(
            repetition=column([p.repetition_penalty for p in params]),
            presence=column([p.presence_penalty for p in params]),
            frequency=column([p.frequency_penalty for p in params]),
            seen=seen,
            count=count,
        )

    def apply(self, logits: Tensor, tokens: Tensor | None = None) -> Tensor:
        """logits [B, V], or [B, X] of `tokens` [B, X] -> the same shape."""
        seen, count = self.seen, self.count
        if tokens is not None:
            seen, count = seen.gather(1, tokens), count.gather(1, tokens)
        repeated = torch.where(logits < 0, logits * self.repetition, logits / self.repetition)
        logits = torch.where(seen, repeated, logits)
        return logits - self.frequency * count - self.presence * (count > 0)

    def after(self, token: Tensor) -> Penalties:
        """The penalties once `token` [B] has been appended to the answers."""
        index = token[:, None]
        ones = torch.ones_like(index, dtype=self.count.dtype)
        return replace(self, seen=self.seen.scatter(1, index, True), count=self.count.scatter_add(1, index, ones))
