"""Heads that score a candidate behind its parent.

A block drafter predicts all slots at once, so a slot does not know which token the slot before will be. A head adds
what a pair of tokens is worth:

    score of candidate c behind token p     u(c) + δ(p, c)     u: the drafter's logit; δ: the head's, of slot and pair
    probability                             e^score / (rest + Σ e^score of all candidates)
    rest                                    what the drafter gives to all other tokens

All heads here are of first order: δ depends on no token before p, so the scores of a whole pass are one table, which
trees read as they grow (`Draft.behind`). Policies that draft chains take the walk: the best candidate of the first
slot, then the best behind it, and so on.

At temperature T, δ is divided by T like the logits. The noise of a position and token does not depend on the token
before, so it stays as it is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.layers import Layer
from d2sd.plugins.trees.types import Draft

# Shape letters: B requests, K blocks a request, G block size γ, S slots, E hidden, M candidates a slot, P parents of a
# slot: what is before it in the block, then the M candidates of the slot before; R rank, V vocabulary.

#: Largest share of the candidates in a slot: the rest is never nothing, since its logarithm is taken.
_MOST = 1 - 1e-6


class Head(nn.Module, ABC):
    """Adds δ to logits: a number for a slot's hidden state, a token and the token before it."""

    #: Candidates of a slot among which it chooses.
    pool: int

    @property
    @abstractmethod
    def successors(self) -> Tensor:
        """A row for each of the target's tokens, as a candidate: [V, R]."""

    @abstractmethod
    def predecessors(self, hidden: Tensor, parents: Tensor) -> Tensor:
        """hidden [..., E] and parents [..., P], the target's ids -> [..., P, R]; its product with a row above is δ."""

    def join(self, embedding: Tensor) -> None:
        """Take what it needs of the target's embedding [V, E]; comes before any pass."""

    def added(self, hidden: Tensor, parents: Tensor, candidates: Tensor) -> Tensor:
        """hidden [..., E], parents [..., P] and candidates [..., M] as the target's ids -> δ [..., P, M] fp32."""
        # an embedding on a CPU copies rows in a tenth of an index's time
        return self.predecessors(hidden, parents).float() @ embedding(candidates, self.successors).float().mT


class HeadConfig(ABC):
    """Geometry of a head and of what comes with it; subclasses are frozen dataclasses."""

    __slots__ = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of its kind."""

    @property
    def is_optional(self) -> bool:
        """Whether the drafter below was trained without it, so that an engine may leave it out."""
        return False

    def precision_refusal(self, precision: str) -> str | None:
        """See `DraftConfig.precision_refusal`."""
        return None

    def layer(self, body: BodyConfig) -> Layer:
        """A layer of the drafter."""
        return Layer(body)

    def of_rows(self, positions: Tensor, size: int | None) -> tuple[Tensor, ...]:
        """More arguments of such layers, for rows at `positions [B, T]`; see `Drafter.forward`."""
        return ()

    @abstractmethod
    def modules(self, hidden_size: int, vocab_size: int) -> Iterator[tuple[str, nn.Module]]:
        """Modules that a drafter has in addition to its body, by their names in checkpoints; one is a `Head`."""


def conditioned(
    head: Head, draft: Draft, hidden: Tensor, blocks: Tensor, mask_token_id: int, temperature: Tensor, width: int
) -> Draft:
    """See `DraftModel.conditioned`; `hidden [B, K, S, E]` is that of the slots.

    A slot stands behind the token at its place in `blocks [B, K, G]`, the anchor or a token of the prefix; where there
    is a mask, behind the candidates of the slot before.
    """
    slots = draft.tokens.shape[-2]
    shown = blocks[..., :slots, None]  # [B, K, S, 1]
    before = torch.cat([shown[..., :1, :].expand_as(draft.tokens[..., :1, :]), draft.tokens[..., :-1, :]], -2)
    added = head.added(hidden, torch.cat([shown, before], -1), draft.tokens)  # [B, K, S, P, M]
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
    rest = torch.log1p(-before.logsumexp(-1, keepdim=True).exp().clamp(max=_MOST))
    scores = (before + added).nan_to_num(-math.inf, posinf=-math.inf, neginf=-math.inf)
    normalised = scores - torch.logaddexp(rest, scores.logsumexp(-1, keepdim=True))
    return normalised.where((added != 0).any(-1, keepdim=True), before)
