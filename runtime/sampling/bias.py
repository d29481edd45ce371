"""Biases on single tokens that may depend on what was written before: logit_bias, bad words, min_tokens and budgets.

A bad word bans its last token after its other tokens, min_tokens bans the stop tokens up to a position, logit_bias
holds anywhere, and the budget of a thought forces its end at a position before which it has not ended, so all four are
entries of one table. It is ragged: its size is the number of entries and of the tokens that they ask for, whatever else
is in the batch. The entries of a request are made once, those of a batch, and of a budget that ends soon, every step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import accumulate, chain, repeat

import torch
from torch import Tensor

from d2sd.modeling.where import tensors_of, with_tensors
from d2sd.runtime.sampling.penalties import Text
from d2sd.runtime.sampling_params import SamplingParams

# Shape letters: B requests, V vocabulary, E entries and C tokens of conditions of all requests, P tokens of the longest
# condition.

_NONE = -1  # in a text: before its first token
_ALWAYS = sys.maxsize  # a position that no text reaches
#: Added to the logit of a token that must come. Times the largest penalty, by the lowest temperature, it is finite.
_FORCED = 1e30


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of one request, on the device."""

    token: Tensor  # [E] int64
    bias: Tensor  # [E] fp32
    since: Tensor  # [E] int64, the first position at which the entry holds
    until: Tensor  # [E] int64, the first position at which the entry holds no more
    length: Tensor  # [E] int64, tokens that must come before
    before: Tensor  # [C] int64, these tokens, entry after entry; ~token: any other than this one
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
        bans = repeat(-torch.inf, len(stops) + len(words))
        ends = [*repeat(_ALWAYS, len(biases)), *repeat(until, len(stops)), *repeat(_ALWAYS, len(words))]
        before = [[*zip(word[:-1], range(len(word) - 1, 0, -1), strict=True)] for word in words]
        conditions = [*repeat([], len(biases) + len(stops)), *before]
        return Entries._made(tokens, [*biases.values(), *bans], [0] * len(tokens), ends, conditions, device)

    @staticmethod
    def of_thought(params: SamplingParams, text: Text, device: str) -> Entries | None:
        """None where no token that the next steps choose spends the budget of a thought."""
        if params.thinking_token_budget is None or text.markers is None:
            return None
        found = text.markers.closings(text.tokens, text.prompt_len, params.thinking_token_budget)
        if not found:
            return None
        places, before = [one.place for one in found], [one.before for one in found]
        tokens, ends = [text.markers.end_id] * len(found), [place + 1 for place in places]
        return Entries._made(tokens, [_FORCED] * len(found), places, ends, before, device)

    @staticmethod
    def _made(
        tokens: list[int],
        biases: list[float],
        since: list[int],
        until: list[int],
        conditions: list[list[tuple[int, int]]],
        device: str,
    ) -> Entries:
        """`conditions` are what must come before each token, and how far."""

        def int64(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        lengths, flat = [len(one) for one in conditions], [*chain.from_iterable(conditions)]
        return Entries(
            token=int64(tokens),
            bias=torch.tensor(biases, dtype=torch.float32, device=device),
            since=int64(since),
            until=int64(until),
            length=int64(lengths),
            before=int64([token for token, _ in flat]),
            entry=torch.repeat_interleave(torch.tensor(lengths), output_size=len(flat)).to(device),
            back=int64([back for _, back in flat]),
            longest=max((back for _, back in flat), default=0),
        )


@dataclass(frozen=True, slots=True)
class TokenBias:
    """The entries of a batch, and the end of each text, which decides on them."""

    entries: Entries  # of all requests, one behind the other
    row: Tensor  # [E] int64, the request that an entry belongs to
    tail: Tensor  # [B, P] int64: the last tokens of prompt and answer
    vocab_size: int

    @staticmethod
    def of(
        params: SequenceOf[SamplingParams], texts: SequenceOf[Text], vocab_size: int, device: str
    ) -> TokenBias | None:
        """None where no request has an entry."""
        biased = [
            (row, t, entries)
            for row, (p, t) in enumerate(zip(params, texts, strict=True))
            if p.has_bias
            for entries in (t.entries or Entries.of(p, t, vocab_size, device), Entries.of_thought(p, t, device))
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
        starts = accumulate(sizes, initial=0)
        shifted = [replace(e, entry=e.entry + start) for e, start in zip(parts, starts, strict=False)]
        columns = map(torch.cat, zip(*map(tensors_of, shifted), strict=True))
        rows = torch.tensor([row for row, *_ in requests])
        return TokenBias(
            entries=replace(with_tensors(parts[0], columns), longest=width),
            row=rows.repeat_interleave(torch.tensor(sizes), output_size=sum(sizes)).to(device),
            tail=tail.to(device),
            vocab_size=vocab_size,
        )

    def apply(self, logits: Tensor, position: Tensor) -> Tensor:
        """logits [B, V] of the token at `position` [B] -> [B, V]."""
        holds, own = self._hold_at(position), self.entries
        if len(own.before):
            said = self.tail[self.row[own.entry], self.tail.shape[1] - own.back]
            met = torch.where(own.before < 0, said != ~own.before, said == own.before)
            holds &= torch.zeros_like(own.length).index_add_(0, own.entry, met.long()) == own.length
        return self._added(logits, holds)

    def apply_at(self, logits: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
        """logits [B, X] of `tokens` [B, X] -> [B, X], by the entries at `position` [B] that need no earlier token."""
        holds = self._hold_at(position) & (self.entries.length == 0)
        whole = self._added(logits.new_zeros(len(logits), self.vocab_size), holds)
        return logits + whole.gather(1, tokens)

    def _hold_at(self, position: Tensor) -> Tensor:
        """Whether each entry [E] holds at `position` [B], whatever comes before."""
        there = position[self.row]
        return (self.entries.since <= there) & (there < self.entries.until)

    def _added(self, logits: Tensor, holds: Tensor) -> Tensor:
        """logits [B, V] with the biases of the entries that hold."""
        index = self.row * logits.shape[1] + self.entries.token
        return logits.flatten().scatter_add(0, index, self.entries.bias.where(holds, 0.0)).view_as(logits)

    def after_token(self, token: Tensor) -> TokenBias:
        """The entries once `token` [B] has been appended to the texts."""
        return replace(self, tail=torch.cat([self.tail, token[:, None]], dim=1)[:, 1:])

    def select(self, rows: Tensor) -> TokenBias:
        """The entries of the requests `rows` [R]; reads back from the device."""
        own, number = self.entries, rows.new_full((len(self.tail),), -1)
        number[rows] = torch.arange(len(rows), device=rows.device)
        row = number[self.row]
        kept = row >= 0
        of_kept = kept[own.entry]
        columns = [column[kept] for column in (own.token, own.bias, own.since, own.until, own.length)]
        columns += own.before[of_kept], (kept.cumsum(0) - 1)[own.entry[of_kept]], own.back[of_kept]
        return replace(self, entries=with_tensors(own, columns), row=row[kept], tail=self.tail[rows])
