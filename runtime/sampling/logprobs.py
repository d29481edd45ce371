"""Log-probabilities of the target's raw logits: before bias, penalties and temperature, as vLLM reports them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from d2sd.runtime.sequence import Sequence, TokenLogprobs

# Shape letters: R rows, W most likely tokens of a row, V vocabulary.

#: Prompt rows whose logits exist at a time: a row of 150,000 tokens has 600 kB.
_ROWS = 64


def pack_logprobs(logits: Tensor, tokens: Tensor, width: int) -> Tensor:
    """logits [..., V] and the token of each row [...] -> [..., 2 + 2W] int64, for `unpack_logprobs`.

    A row is the token's rank, the ids of the W likeliest tokens, and the bits of 1 + W log-probabilities.
    """
    top, ids = logits.topk(min(width, logits.shape[-1]), dim=-1)
    own = logits.gather(-1, tokens[..., None])
    rank = (logits > own).sum(-1, keepdim=True) + 1
    logprobs = torch.cat([own, top], dim=-1) - logits.logsumexp(-1, keepdim=True)
    return torch.cat([rank, ids, logprobs.view(torch.int32).long()], dim=-1)


def unpack_logprobs(rows: Tensor, tokens: list[int]) -> list[TokenLogprobs]:
    """rows [R, 2 + 2W] on the host, of `tokens`; rows past the last token are ignored."""
    width = (rows.shape[1] - 2) // 2
    floats: list[list[float]] = rows[:, 1 + width :].int().view(torch.float32).tolist()
    return [
        TokenLogprobs(token, own, rank, tuple(zip(ids, top, strict=True)))
        for token, (rank, *ids), (own, *top) in zip(tokens, rows[:, : 1 + width].tolist(), floats, strict=False)
    ]


def prompt_logprobs(sequence: Sequence, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Iterator[TokenLogprobs]:
    """Of the prompt tokens that follow the rows `hidden` [R, E] of `sequence`, the first one at position `cached`.

    Tokens that were reported before, ahead of a preemption, are left out. Reads the result back to the host.
    """
    asked = sequence.request.sampling.prompt_logprobs
    assert asked is not None
    first = 1 + len(sequence.prompt_logprobs)  # position of the next token to report
    last = min(sequence.cached + len(hidden) + 1, len(sequence.request.prompt))
    for start in range(first, last, _ROWS):
        tokens = sequence.tokens[start : min(start + _ROWS, last)]
        row = start - 1 - sequence.cached
        logits = head(hidden[row : row + len(tokens)].contiguous())
        packed = pack_logprobs(logits, torch.tensor(tokens, device=logits.device), asked)
        yield from unpack_logprobs(packed.cpu(), tokens)
