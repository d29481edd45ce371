"""Log-probabilities of the target's raw logits: before bias, penalties and temperature, as vLLM reports them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Protocol, overload

import torch
from torch import Tensor

from d2sd.runtime.batch import Prefilled
from d2sd.runtime.sequence import Sequence, TokenLogprobs

# Shape letters: R rows, W most likely tokens of a row, V vocabulary.

#: Prompt rows whose logits exist at a time: a row of 150,000 tokens has 600 kB.
_ROWS = 64


def pack_logprobs(logits: Tensor, tokens: Tensor, width: int) -> Tensor:
    """logits [..., V] and the token of each row [...] -> [..., 2 + 2W] int64, for `unpack_logprobs`.

    A row is the token's rank, the ids of the W likeliest tokens, of equal ones the smaller first, and the bits of 1 + W
    log-probabilities.
    """
    top, ids = _likeliest(logits, min(width, logits.shape[-1]))
    token_logit = logits.gather(-1, tokens[..., None])
    rank = (logits > token_logit).sum(-1, keepdim=True) + 1
    logprobs = torch.cat([token_logit, top], dim=-1) - logits.logsumexp(-1, keepdim=True)
    return torch.cat([rank, ids, logprobs.view(torch.int32).long()], dim=-1)


def _likeliest(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest logits [..., V] and their tokens, of equal ones the smaller first: both [..., W].

    `topk` takes any of the equal ones, others in another batch or for another width.
    """
    top, ids = logits.topk(width, dim=-1)
    if not width:
        return top, ids
    size, last = logits.shape[-1], top[..., -1:]
    descending = torch.arange(size, 0, -1, dtype=torch.float32, device=logits.device)  # exact below 2^24
    ties, equal = descending.where(logits == last, 0.0).topk(width, dim=-1)  # the first of those that equal the last
    tokens = torch.cat([ids.where(top > last, size), equal.where(ties > 0, size)], dim=-1)  # size: no token
    values = torch.cat([top, last.expand_as(top)], dim=-1).where(tokens < size, -torch.inf)
    tokens, order = tokens.sort(dim=-1)
    values, best = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(-1, best[..., :width])
    return values[..., :width], tokens.clamp(max=size - 1)  # of a row with NaN there may be too few


def unpack_logprobs(rows: Tensor, tokens: list[int]) -> list[TokenLogprobs]:
    """rows [R, 2 + 2W] on the host, of `tokens`; rows past the last token are ignored."""
    width = (rows.shape[1] - 2) // 2
    floats: list[list[float]] = rows[:, 1 + width :].int().view(torch.float32).tolist()
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(ids, top, strict=True)))
        for token, (rank, *ids), (logprob, *top) in zip(tokens, rows[:, : 1 + width].tolist(), floats, strict=False)
    ]


class PromptLogprobs(SequenceOf[TokenLogprobs]):
    """Log-probabilities of a prompt, 16 bytes a reported token.

    An entry becomes an object when it is read: the engine's thread, for which all requests wait, makes none.
    """

    def __init__(self) -> None:
        self._rows: list[Callable[[], Tensor]] = []  # of `pack_logprobs`, which are on their way to the host
        self._tokens: list[int] = []

    def add(self, rows: Callable[[], Tensor], tokens: SequenceOf[int]) -> None:
        """Append packed rows [R, 2 + 2W] of `tokens`; the first reader calls `rows`, which may wait for the device."""
        self._rows.append(rows)
        self._tokens += tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        if isinstance(index, slice):
            numbers = range(len(self))[index]
            rows = torch.cat([read() for read in self._rows])[list(numbers)] if self._rows else torch.empty(0, 2)
            return unpack_logprobs(rows, [self._tokens[number] for number in numbers])
        place = range(len(self))[index]
        return self[place : place + 1][0]

    def __iter__(self) -> Iterator[TokenLogprobs]:
        start = 0
        for read in self._rows:
            rows = read()
            yield from unpack_logprobs(rows, self._tokens[start : start + len(rows)])
            start += len(rows)


class Head(Protocol):
    """The part of a `ModelRunner` that reads prompts."""

    def prompt_logits(self, hidden: Tensor) -> Tensor:
        """The target's logits [R, V] in fp32 behind rows [R, E]."""

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to copy a tensor to the host; the function returned waits for it."""


def add_prompt_logprobs(chunks: SequenceOf[tuple[Sequence, int]], rows: Prefilled, head: Head) -> None:
    """Report the tokens behind the `rows` of a prefill, of which each (sequence, count) has the next `count`, to the
    sequences that ask for them. Nothing waits for the device.
    """
    start = 0
    for sequence, count in chunks:
        if sequence.needs_prompt_rows and rows.following is not None:
            own = slice(start, start + count)
            _add_prompt_logprobs(sequence, rows.hidden[own], rows.following[own], head)
        start += count


def _add_prompt_logprobs(sequence: Sequence, hidden: Tensor, following: Tensor, head: Head) -> None:
    """Report the tokens `following` [R] the rows `hidden` [R, E] of `sequence`, the first one at position `cached`.

    Tokens that were reported before, ahead of a preemption, are left out.
    """
    width, prompt_logprobs = sequence.request.sampling.prompt_logprobs, sequence.prompt_logprobs
    assert width is not None
    if not isinstance(prompt_logprobs, PromptLogprobs):
        sequence.prompt_logprobs = prompt_logprobs = PromptLogprobs()
    last = min(sequence.cached + len(hidden) + 1, len(sequence.request.prompt))
    for start in range(1 + len(prompt_logprobs), last, _ROWS):  # the position of a token to report
        tokens = sequence.tokens[start : min(start + _ROWS, last)]
        row = start - 1 - sequence.cached
        rows = slice(row, row + len(tokens))
        logits = head.prompt_logits(hidden[rows].contiguous())
        prompt_logprobs.add(head.fetch(pack_logprobs(logits, following[rows], width)), tokens)
