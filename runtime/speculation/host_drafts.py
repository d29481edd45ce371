"""First drafts that the host holds between two steps (`FirstPass.CARRIED`)."""

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
