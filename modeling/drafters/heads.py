"""Heads that score a candidate behind its parent.

A block drafter predicts all slots at once, so a slot does not know which token the slot before will be. A head adds
what a pair of tokens is worth:

    score of candidate c behind token p     u(c) + δ(p, c)     u: the drafter's logit; δ: the head's, of slot and pair

`d2sd.plugins.pair_scores` makes probabilities of them. All heads here are of first order: δ depends on no token before
p, so the scores of a whole pass are one table, which trees read as they grow (`Draft.behind`). Policies that draft
chains take the walk: the best candidate of the first slot, then the best behind it, and so on.

At temperature T, δ is divided by T like the logits. The noise of a position and token does not depend on the token
before, so it stays as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from d2sd.plugins import pair_scores
from d2sd.plugins.pair_scores import Factors, parents_of
from d2sd.plugins.trees.types import Draft

if TYPE_CHECKING:
    from d2sd.modeling.decoder import TargetModel

# Shape letters: B requests, K blocks a request, G block size γ, S slots, E hidden, M candidates a slot, P parents of a
# slot: what is before it in the block, then the M candidates of the slot before; R rank, V vocabulary.

#: Blocks of a pass, of all requests and branches, whose counters are kept.
MOST_BLOCKS = 1024


class Head(nn.Module, ABC):
    """Adds δ to logits: a number for a slot's hidden state, a token and the token before it."""

    #: Candidates of a slot among which it chooses.
    pool: int
    #: Counters of the kernel, which leaves them 0; its passes run in order. None before `join`.
    arrived: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("arrived", None, persistent=False)

    @property
    @abstractmethod
    def successors(self) -> Tensor:
        """A row for each of the target's tokens, as a candidate: [V, R]."""

    @abstractmethod
    def predecessors(self, hidden: Tensor, parents: Tensor) -> Tensor:
        """hidden [..., E] and parents [..., P], the target's ids -> [..., P, R]; its product with a row above is δ."""

    def factors(self, hidden: Tensor, draft: Draft, blocks: Tensor) -> Factors:
        """δ of a draft's candidates [B, K, S, M] behind their parents, for hidden [B, K, S, E] and blocks [B, K, G]."""
        return Factors(self.predecessors(hidden, parents_of(draft.tokens, blocks)), self.successors)

    def join(self, embedding: Tensor) -> None:
        """Take what it needs of the target's embedding [V, E]; comes before any pass."""
        self.arrived = torch.zeros(MOST_BLOCKS, dtype=torch.int32, device=next(self.parameters()).device)

    def attach(self, target: TargetModel, norm: nn.Module) -> None:
        """Keep the target and the drafter's last norm, where it scores by these; comes before any pass."""

    def widened(self, x: Tensor, tokens: Tensor, mask_token_id: int) -> Tensor:
        """Rows x [..., E] of tokens [...] as the drafter's layers take them, which may be wider."""
        return x

    def added(self, hidden: Tensor, parents: Tensor, candidates: Tensor) -> Tensor:
        """hidden [..., E], parents [..., P] and candidates [..., M] as the target's ids -> δ [..., P, M] fp32."""
        # an embedding on a CPU copies rows in a tenth of an index's time
        return self.predecessors(hidden, parents).float() @ embedding(candidates, self.successors).float().mT


def conditioned(
    head: Head, draft: Draft, hidden: Tensor, blocks: Tensor, mask_token_id: int, temperature: Tensor, width: int
) -> Draft:
    """See `DraftModel.conditioned`; `hidden [B, K, S, E]` is that of the slots."""
    factors = head.factors(hidden, draft, blocks)
    return pair_scores.conditioned(blocks, draft, factors, mask_token_id, temperature, width, head.arrived)
