"""First drafts that the host holds between two steps: carried ones (`FirstPass.CARRIED`), and prompt lookup's, the free
baseline: the tokens after the last earlier occurrence of the text's suffix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from d2sd.plugins.trees import Draft

# Shape letters: B requests, S slots after the anchor, M candidates a slot.


def pack_draft(draft: Draft) -> Tensor:
    """[B, 2·S·M] int64: tokens, then log-probabilities bit by bit."""
    bits = draft.logprob.float().contiguous().view(torch.int32)
    return torch.cat([draft.tokens.flatten(1), bits.flatten(1).long()], dim=1)


def carried_draft(rows: Sequence[Sequence[int] | None], slots: int, width: int, batch_size: int) -> Draft:
    """A first draft [B, S, M] of rows of `pack_draft` on the host; None, and what pads the batch: no proposal."""
    tokens = torch.zeros(batch_size, slots * width, dtype=torch.long)
    logprob = torch.full((batch_size, slots * width), -math.inf)
    for index, row in enumerate(rows):
        if row is not None:
            tokens[index], bits = torch.tensor(row).view(2, -1)
            logprob[index] = bits.to(torch.int32).view(torch.float32)
    return Draft(tokens.view(batch_size, slots, width), logprob.view(batch_size, slots, width))


#: Suffix lengths, longest first: a longer match is likelier to continue the same way.
SUFFIXES = (3, 2, 1)


def lookup(tokens: list[int], count: int) -> list[int]:
    """`count` tokens that followed the last earlier occurrence of the longest suffix of at most 3 tokens, or none."""
    for size in SUFFIXES:
        suffix = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == suffix:
                copied = list(tokens)
                for index in range(start + size, start + size + count):
                    copied.append(copied[index])  # past the end it copies its own output, so repetitions continue
                return copied[len(tokens) :]
    return []


def lookup_draft(texts: Sequence[list[int]], slots: int, batch_size: int) -> Draft:
    """A first draft [B, S, 1] for a batch of `batch_size`: probability 1 if a text has a match, else no proposal.

    It is searched on the host and stays there: an input of the step.
    """
    found = [lookup(tokens, slots) for tokens in texts]
    found += [[]] * (batch_size - len(found))
    tokens = torch.tensor([ids or [0] * slots for ids in found], dtype=torch.long)
    known = torch.tensor([bool(ids) for ids in found])
    logprob = torch.where(known[:, None], 0.0, float("-inf")).expand(-1, slots)
    return Draft(tokens.view(-1, slots, 1), logprob[..., None])
