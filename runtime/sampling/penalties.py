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

if TYPE_CHECKING:
    from d2sd.runtime.sampling.bias import Entries

# Shape letters: B requests, V vocabulary.


class Text(NamedTuple):
    """Token counts on which a request's sampling depends besides its parameters."""

    tokens: SequenceOf[int]  # prompt and answer so far
    prompt_len: int
    stop_tokens: frozenset[int] = frozenset()
    entries: Entries | None = None  # those of its biases, if they have been made


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
        flat, answered = [], []  # tokens of all texts as places in [B, V], and which are of answers
        for row, (request_params, text) in enumerate(zip(params, texts, strict=True)):
            if request_params.has_penalty:
                flat.append(torch.tensor(text.tokens, dtype=torch.long) + row * vocab_size)
                answered.append(torch.arange(len(text.tokens)) >= text.prompt_len)
        places = torch.cat(flat).to(device)
        empty = torch.zeros(len(texts) * vocab_size, device=device)

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        return Penalties(
            repetition=column([p.repetition_penalty for p in params]),
            presence=column([p.presence_penalty for p in params]),
            frequency=column([p.frequency_penalty for p in params]),
            seen=empty.bool().scatter(0, places, True).view(-1, vocab_size),
            count=empty.scatter_add(0, places, torch.cat(answered).float().to(device)).view(-1, vocab_size),
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
