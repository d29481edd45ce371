"""Repetition, presence and frequency penalties: functions of the tokens before a row, the path of its node included.

The repetition penalty counts prompt and answer, the other two the answer alone, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from d2sd.runtime.buckets import bucket
from d2sd.runtime.request import SamplingParams

# Shape letters: B requests, V vocabulary, L tokens of the longest text (a bucket).


class Text(NamedTuple):
    """What a request's sampling depends on besides its parameters."""

    tokens: SequenceOf[int]  # prompt and answer so far
    prompt_len: int
    stop_tokens: frozenset[int] = frozenset()


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
        """None where no request has a penalty. Counts are taken from the texts each time, so nothing can go stale."""
        if not any(p.has_penalty for p in params):
            return None
        texts = [t if p.has_penalty else NO_TEXT for p, t in zip(params, texts, strict=True)]
        size = bucket(max(len(t.tokens) for t in texts) or 1)
        # token V is padding: its column is cut off
        tokens = torch.tensor([[*t.tokens, *[vocab_size] * (size - len(t.tokens))] for t in texts], device=device)
        prompt_len = torch.tensor([[t.prompt_len] for t in texts], device=device)
        answered = (torch.arange(size, device=device) >= prompt_len).float()
        empty = torch.zeros(len(texts), vocab_size + 1, device=device)

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        return Penalties(
            repetition=column([p.repetition_penalty for p in params]),
            presence=column([p.presence_penalty for p in params]),
            frequency=column([p.frequency_penalty for p in params]),
            seen=empty.bool().scatter(1, tokens, True)[:, :vocab_size],
            count=empty.scatter_add(1, tokens, answered)[:, :vocab_size],
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
        one = torch.ones_like(index, dtype=self.count.dtype)
        return replace(self, seen=self.seen.scatter(1, index, True), count=self.count.scatter_add(1, index, one))
