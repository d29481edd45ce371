"""Biases on single tokens that may depend on what was written before: logit_bias, bad words and min_tokens.

A bad word bans its last token after its other tokens, min_tokens bans the stop tokens up to a position, and logit_bias
holds anywhere, so all three are entries of one sparse table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from d2sd.runtime.buckets import bucket
from d2sd.runtime.request import SamplingParams
from d2sd.runtime.sampling.penalties import Text

# Shape letters: B requests, V vocabulary, E entries a request, P tokens of the longest condition (both buckets).

_ANY, _NONE = -1, -2  # in a condition: any token; in a text: before its first token


class _Entry(NamedTuple):
    token: int
    bias: float
    after: tuple[int, ...] = ()  # the tokens that must come before
    until: int = sys.maxsize  # the first position at which it holds no more


_PADDING = _Entry(0, 0.0)


@dataclass(frozen=True, slots=True)
class TokenBias:
    """Entries of a batch, and the end of each text, which decides on them."""

    token: Tensor  # [B, E] int64
    bias: Tensor  # [B, E] fp32
    after: Tensor  # [B, E, P] int64, aligned to the right
    until: Tensor  # [B, E] int64
    tail: Tensor  # [B, P] int64: the last tokens of prompt and answer

    @staticmethod
    def of(
        params: SequenceOf[SamplingParams], texts: SequenceOf[Text], vocab_size: int, device: str
    ) -> TokenBias | None:
        """None where no request has an entry."""
        table = [_entries(p, t, vocab_size) for p, t in zip(params, texts, strict=True)]
        if not any(table):
            return None
        count = bucket(max(map(len, table)))
        longest = max(len(entry.after) for row in table for entry in row)
        width = bucket(longest) if longest else 0
        table = [[*row, *[_PADDING] * (count - len(row))] for row in table]
        after = [[[*[_ANY] * (width - len(e.after)), *e.after] for e in row] for row in table]
        tails = [list(t.tokens[len(t.tokens) - min(width, len(t.tokens)) :]) for t in texts]
        return TokenBias(
            token=torch.tensor([[e.token for e in row] for row in table], device=device),
            bias=torch.tensor([[e.bias for e in row] for row in table], dtype=torch.float32, device=device),
            after=torch.tensor(after, dtype=torch.long, device=device),
            until=torch.tensor([[e.until for e in row] for row in table], device=device),
            tail=torch.tensor(
                [[_NONE] * (width - len(tail)) + tail for tail in tails], dtype=torch.long, device=device
            ),
        )

    def apply(self, logits: Tensor, position: Tensor) -> Tensor:
        """logits [B, V] of the token at `position` [B] -> [B, V]."""
        matches = ((self.after == self.tail[:, None]) | (self.after == _ANY)).all(-1)
        holds = matches & (position[:, None] < self.until)
        return logits.scatter_add(1, self.token, self.bias.where(holds, 0.0))

    def apply_at(self, logits: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
        """logits [B, X] of `tokens` [B, X] -> [B, X], by the entries at `position` [B] that need no earlier token."""
        holds = (self.after == _ANY).all(-1) & (position[:, None] < self.until)
        same = tokens[..., None] == self.token[:, None]
        return logits + self.bias.where(holds, 0.0)[:, None].where(same, 0.0).sum(-1)

    def after_token(self, token: Tensor) -> TokenBias:
        """The entries once `token` [B] has been appended to the texts."""
        return replace(self, tail=torch.cat([self.tail, token[:, None]], dim=1)[:, 1:])


def _entries(params: SamplingParams, text: Text, vocab_size: int) -> list[_Entry]:
    return [
        *(_Entry(token, bias) for token, bias in params.logit_bias),
        *(_Entry(word[-1], float("-inf"), word[:-1]) for word in params.bad_words),
        *(
            _Entry(token, float("-inf"), until=text.prompt_len + params.min_tokens)
            for token in sorted(text.stop_tokens)
            if params.min_tokens and 0 <= token < vocab_size  # others are never chosen
        ),
    ]
