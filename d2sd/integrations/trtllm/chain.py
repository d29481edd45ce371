"""One chain out of two drafts: the first up to its likeliest rejection, then the second pass's.

    first draft            a b c d e      likeliest event: rejected after b
    second pass, a b kept  a b x y z      its block is  anchor a b mask mask mask
    chain                  a b x y z      unless the first is expected to go further

The rejected token is not masked at the boundary, as it is in a tree: a tree holds both drafters' tokens there, a chain
only one, and the second drafter may confirm the first one's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from d2sd.plugins.trees import Draft, chain_branches, restart_blocks

# Shape letters: B requests, S drafts a step, W width of the drafter's block (at least S + 1), V vocabulary.

#: The second pass: token ids [B, W], anchor first -> logits of slots 1 .. S, [B, S, V].
SecondPass = Callable[[Tensor], Tensor]


def spliced(logits: Tensor, anchor: Tensor, mask_token_id: int, width: int, second: SecondPass) -> Tensor:
    """Logits [B, S, V] of the first pass -> logits of the chain to propose; each slot is taken from one of the passes.

    Shapes are static and nothing is read back to the host, so a CUDA graph can capture it.
    """
    slots = logits.shape[1]
    first = _best(logits)
    branch = chain_branches(first, 1)  # at S, "everything accepted", the second pass adds nothing
    block = restart_blocks(branch, anchor, mask_token_id)[:, 0]
    again = second(pad(block, (0, width - block.shape[1]), value=mask_token_id)).to(logits.dtype)
    kept = torch.arange(slots, device=logits.device) < branch.prefix_len
    chain = torch.where(kept[..., None], logits, again)
    better = expected_length(_best(chain)) > expected_length(first)
    return torch.where(better[:, None, None], chain, logits)


def expected_length(draft: Draft) -> Tensor:
    """Expected number of accepted drafts if the drafters' confidence is calibrated: Draft of [B, S, 1] -> [B]."""
    return draft.confidence.cumsum(-1).exp().sum(-1)


def _best(logits: Tensor) -> Draft:
    """[B, S, V] -> the likeliest token of every slot."""
    wide = logits.float()
    top, tokens = wide.max(-1, keepdim=True)
    return Draft(tokens, top - wide.logsumexp(-1, keepdim=True))
