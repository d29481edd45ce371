"""Biases on single tokens that may depend on what was written before: logit_bias, bad words and min_tokens.

A bad word bans its last token after its other tokens, min_tokens bans the stop tokens up to a position, and logit_bias
holds anywhere, so all three are entries of one table. It is ragged: its size is the number of entries and of the tokens
that they ask for, whatever else is in the batch. The entries of a request are made once, those of a batch every step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import accumulate, chain, repeat

import torch
from torch import Tensor

from d2sd.runtime.sampling.penalties import Text
from d2sd.runtime.sampling_params import SamplingParams

# Shape letters: B requests, V vocabulary, E entries and C tokens of conditions of all requests, P tokens of the longest
# condition.

_NONE = -1  # in a text: before its first token
_ALWAYS = sys.maxsize  # a position that no text reaches


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of one request, on the device."""

    token: Tensor  # [E] int64
    bias: Tensor  # [E] fp32
    until: Tensor  # [E] int64, the first position at which the entry holds no more
    length: Tensor  # [E] int64, tokens that must come before
    before: Tensor  # [C] int64, these tokens, entry after entry
    entry: Tensor  # [C] int64, whose they are
    back: Tensor  # [C] int64, how far before the entry's token each must be, 1 the next
    longest: int

    @staticmethod
    def of(params: SamplingParams, text: Text, vocab_size: int, device: str) -> Entries | None:
        """None for a request without any."""
        biases = params.logit_bias
        stops = [t for t in text.stop_tokens if 0 <= t < vocab_size] if params.min_tokens else []  # no other is chosen
        words = params.bad_words_token_ids
        tokens = [*biases, *stops, *(word[-1] for word in words)]
        if not tokens:
            return None
        until = text.prompt_len + params.min_tokens
        lengths = [*repeat(0, len(biases) + len(stops)), *(len(word) - 1 for word in words)]
        bans = repeat(-torch.inf, len(stops) + len(words))
        ends = [*repeat(_ALWAYS, len(biases)), *repeat(until, len(stops)), *repeat(_ALWAYS, len(words))]

        def int64(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        length = int64(lengths)
        entry = torch.repeat_interleave(torch.tensor(lengths), output_size=sum(lengths)).to(device)
        stop = int64([*accumulate(lengths)])  # behind each entry's tokens in `before`
        before = int64([*chain.from_iterable(word[:-1] for word in words)])
        return Entries(
            token=int64(tokens),
            bias=torch.tensor([*biases.values(), *bans], dtype=torch.float32, device=device),
            until=int64(ends),
            length=length,
            before=before,
            entry=entry,
            back=stop[entry] - torch.arange(len(before), device=device),
            longest=max(lengths),
        )


@dataclass(frozen=True, slots=True)
class TokenBias:
    """The entries of a batch, and the end of each text, which decides on them."""

    row: Tensor  # [E] int64, the request that an entry belongs to
    token: Tensor  # [E] int64
    bias: Tensor  # [E] fp32
    until: Tensor  # [E] int64
    length: Tensor  # [E] int64
    before: Tensor  # [C] int64
    entry: Tensor  # [C] int64
    back: Tensor  # [C] int64
    tail: Tensor  # [B, P] int64: the last tokens of prompt and answer
    vocab_size: int

    @staticmethod
    def of(
        params: SequenceOf[SamplingParams], texts: SequenceOf[Text], vocab_size: int, device: str
    ) -> TokenBias | None:
        """None where no request has an entry."""
        biased = [
            (row, t, t.entries or Entries.of(p, t, vocab_size, device))
            for row, (p, t) in enumerate(zip(params, texts, strict=True))
            if p.has_bias
        ]
        requests = [(row, text, entries) for row, text, entries in biased if entries is not None]
        if not requests:
            return None
        parts = [entries for *_, entries in requests]
        width = max(entries.longest for entries in parts)
        tail = torch.full((len(params), width), _NONE)
        for row, text, entries in requests:
            last = text.tokens[max(len(text.tokens) - entries.longest, 0) :] if entries.longest else ()
            tail[row, width - len(last) :] = torch.tensor(last, dtype=torch.long)
        sizes = [len(entries.token) for entries in parts]
        shifted = (e.entry + start for e, start in zip(parts, accumulate(sizes, initial=0), strict=False))
        rows = torch.tensor([row for row, *_ in requests])
        return TokenBias(
            row=rows.repeat_interleave(torch.tensor(sizes), output_size=sum(sizes)).to(device),
            token=torch.cat([e.token for e in parts]),
            bias=torch.cat([e.bias for e in parts]),
            until=torch.cat([e.until for e in parts]),
            length=torch.cat([e.length for e in parts]),
            before=torch.cat([e.before for e in parts]),
            entry=torch.cat([*shifted]),
            back=torch.cat([e.back for e in parts]),
            tail=tail.to(device),
            vocab_size=vocab_size,
        )

    def apply(self, logits: Tensor, position: Tensor) -> Tensor:
        """logits [B, V] of the token at `position` [B] -> [B, V]."""
        holds = position[self.row] < self.until
        if len(self.before):
            there = self.tail[self.row[self.entry], self.tail.shape[1] - self.back] == self.before
            holds &= torch.zeros_like(self.length).index_add_(0, self.entry, there.long()) == self.length
        return self._added(logits, holds)

    def apply_at(self, logits: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
        """logits [B, X] of `tokens` [B, X] -> [B, X], by the entries at `position` [B] that need no earlier token."""
        holds = (position[self.row] < self.until) & (self.length == 0)
        whole = self._added(logits.new_zeros(len(logits), self.vocab_size), holds)
        return logits + whole.gather(1, tokens)

    def _added(self, logits: Tensor, holds: Tensor) -> Tensor:
        """logits [B, V] with the biases of the entries that hold."""
        index = self.row * logits.shape[1] + self.token
        return logits.flatten().scatter_add(0, index, self.bias.where(holds, 0.0)).view_as(logits)

    def after_token(self, token: Tensor) -> TokenBias:
        """The entries once `token` [B] has been appended to the texts."""
        return replace(self, tail=torch.cat([self.tail, token[:, None]], dim=1)[:, 1:])

    def select(self, rows: Tensor) -> TokenBias:
        """The entries of the requests `rows` [R]; reads back from the device."""
        number = rows.new_full((len(self.tail),), -1)
        number[rows] = torch.arange(len(rows), device=rows.device)
        row = number[self.row]
        selected = row >= 0
        of_selected = selected[self.entry]
        return replace(
            self,
            row=row[selected],
            token=self.token[selected],
            bias=self.bias[selected],
            until=self.until[selected],
            length=self.length[selected],
            before=self.before[of_selected],
            entry=(selected.cumsum(0) - 1)[self.entry[of_selected]],
            back=self.back[of_selected],
            tail=self.tail[rows],
        )
