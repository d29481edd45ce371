"""Scores of candidates behind their parents in plain PyTorch: the specification.

    score of candidate c behind token p     u(c) + δ(p, c)     u: the drafter's logit; δ: the head's, of slot and pair
    probability                             e^score / (rest + Σ e^score of all candidates)
    rest                                    what the drafter gives to all other tokens

δ is a product of factors: a row of the token before, one of the slot, one of the candidate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from d2sd.plugins.dispatch import op
from d2sd.plugins.trees.types import Draft

# Shape letters: B requests, K blocks a request, G block size γ, S slots, M candidates a slot, P = 1 + M parents of a
# slot: what is before it in the block, then the candidates of the slot before; R rank, V vocabulary.

#: Largest share of the candidates in a slot: the rest is never nothing, since its logarithm is taken.
MOST = 1 - 1e-6


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of a head's δ(p, c) = ⟨before(p) ⊙ of_slot, behind(c)⟩."""

    before: Tensor  # [V, R], a row for each of the target's tokens; or [B, K, S, P, R], one for each parent of a slot
    behind: Tensor  # [V, R]
    of_slot: Tensor | None = None  # [B, K, S, R]; None: ones


def parents_of(tokens: Tensor, blocks: Tensor) -> Tensor:
    """The tokens [B, K, S, P] behind which a slot's candidates [B, K, S, M] may stand, in blocks [B, K, G]."""
    shown = blocks[..., : tokens.shape[-2], None]
    before = torch.cat([shown[..., :1, :].expand_as(tokens[..., :1, :]), tokens[..., :-1, :]], -2)
    return torch.cat([shown, before], -1)


def factored(before: Tensor, of_slot: Tensor | None, parents: Tensor) -> Tensor:
    """Rows [..., P, R] of the table `before` [V, R] at parents [..., P], by those of their slots [..., R]."""
    rows = embedding(parents, before)
    return rows if of_slot is None else rows.float() * of_slot[..., None, :].float()


@op("the scores of pairs", launcher="kernels", library=True)
def conditioned(
    blocks: Tensor,
    draft: Draft,
    factors: Factors,
    mask_token_id: int,
    temperature: Tensor,
    width: int,
    arrived: Tensor | None = None,
) -> Draft:
    """The `width` best of a draft's candidates [B, K, S, M], at most M, best first behind the best of the slot before,
    and what each is worth behind each parent (`Draft.behind`; None at a width of 1).

    A slot stands behind the token at its place in `blocks [B, K, G]`, the anchor or a token of the prefix; where there
    is a mask, behind the candidates of the slot before. δ is divided by the temperatures [B] that are not 0.

    δ that is NaN, or infinite, proposes nothing behind its parent. Behind a parent whose δ are all 0 log-probabilities
    stay as they are, to the bit. Of equal scores the earlier candidate comes first.

    `arrived` is for the kernel: zeros [at least B·K] int32 that are zeros again afterwards, for calls that run in
    order; without, or where it has fewer, a call makes its own.
    """
    slots = draft.tokens.shape[-2]
    shown, parents = blocks[..., :slots, None], parents_of(draft.tokens, blocks)  # [B, K, S, 1], [B, K, S, P]
    before, behind = factors.before, embedding(draft.tokens, factors.behind)
    rows = factored(before, factors.of_slot, parents) if before.dim() == 2 else before
    added = rows.float() @ behind.float().mT  # [B, K, S, P, M]
    added = added / torch.where(temperature > 0, temperature, 1.0).view(-1, *[1] * 4)
    is_known, is_first = (shown != mask_token_id)[..., None], torch.arange(added.shape[-2], device=added.device) == 0
    added = torch.where(is_known, added[..., :1, :], added.masked_fill(is_first[:, None], 0.0))
    table = _normalised(draft.logprob, added)

    following = table.argmax(-1) + 1  # [B, K, S, P]: the row of the slot behind, where each row's best is taken
    taken = [torch.zeros_like(shown[..., 0, :])]  # [B, K, 1]: the row of each slot along the walk
    for slot in range(slots - 1):
        taken.append(following[..., slot, :].gather(-1, taken[-1]))
    rows = torch.stack(taken, -2)[..., None]
    walk = table.gather(-2, rows.expand(*rows.shape[:-1], table.shape[-1]))[..., 0, :]
    logprob, order = walk.sort(dim=-1, descending=True, stable=True)
    order = order[..., :width]
    tokens, logprob = draft.tokens.gather(-1, order), logprob[..., :width]
    if width == 1:
        return Draft(tokens, logprob)
    # The rows of a slot in the order of the slot before, behind the row of what is not known.
    rows = torch.cat([order[..., :1, :], order[..., :-1, :]], -2) + 1
    rows = torch.cat([torch.zeros_like(rows[..., :1]), rows], -1)[..., None]
    table = table.gather(-2, rows.expand(*rows.shape[:-1], table.shape[-1]))
    columns = order[..., None, :].expand(*table.shape[:-1], order.shape[-1])
    return Draft(tokens, logprob, table.gather(-1, columns))


def _normalised(logprob: Tensor, added: Tensor) -> Tensor:
    """Log-probabilities [..., M] of candidates, and what is added behind each parent [..., P, M] -> [..., P, M].

    Behind a parent of which the head says nothing they stay as they are, to the bit.
    """
    before = logprob[..., None, :]
    rest = torch.log1p(-before.logsumexp(-1, keepdim=True).exp().clamp(max=MOST))
    scores = (before + added).nan_to_num(-math.inf, posinf=-math.inf, neginf=-math.inf)
    normalised = scores - torch.logaddexp(rest, scores.logsumexp(-1, keepdim=True))
    return normalised.where((added != 0).any(-1, keepdim=True), before)
