"""The pair head: what a candidate is worth behind its parent, in projections of the target's embedding.

    δ(p, c) = ⟨A ē_p ⊙ G h, B ē_c⟩ / √R        h: the slot's hidden state; ē_x: the embedding of x, divided by its RMS

It is DFlash 2's selector with codebooks that know every token before any training, since the embedding does: three
matrices [R, E] in place of two tables [V, R], and no convolutions. The drafter below it stays as it is. A head with
B = 0 adds nothing.

Tables of both projections over the vocabulary are made once, from the target that the drafter is attached to.
Checkpoints do not hold them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.drafters.head_configs import PairConfig
from d2sd.modeling.drafters.heads import Head
from d2sd.plugins.pair_scores import Factors, factored
from d2sd.plugins.trees.types import Draft

# Shape letters: E hidden, R rank, V vocabulary, N tokens, M candidates a slot, P parents of a slot.

#: Rows of the embedding that are projected at a time: 19 MB of fp32 at a hidden size of 576.
_ROWS = 8192


class PairHead(Head):
    """A head whose tables, over the target's ids, are there once it has joined a target."""

    predecessor_table: Tensor | None  # [V, R], A ē
    successor_table: Tensor | None  # [V, R], B ē / √R

    def __init__(self, config: PairConfig, hidden_size: int) -> None:
        super().__init__()
        self.pool, self._scale = config.candidates, config.rank**-0.5
        # no layers, which would be packed for inference: no pass uses them
        self.predecessor_projection = nn.Parameter(torch.empty(config.rank, hidden_size))
        self.successor_projection = nn.Parameter(torch.empty(config.rank, hidden_size))
        self.hidden_projection = nn.Linear(hidden_size, config.rank, bias=False)
        self.register_buffer("predecessor_table", None, persistent=False)
        self.register_buffer("successor_table", None, persistent=False)

    @torch.no_grad()
    def start(self, generator: torch.Generator) -> None:
        """The weights before training: it adds nothing yet, and B has a gradient."""
        for weight in (self.predecessor_projection, self.hidden_projection.weight):
            weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))
        self.successor_projection.zero_()

    @torch.no_grad()
    def join(self, embedding: Tensor) -> None:
        """Make the tables, of the target's embedding [V, E], on the device and in the type of the head."""
        super().join(embedding)
        dtype, device, pairs = self.successor_projection.dtype, self.successor_projection.device, []
        for part in embedding.split(_ROWS):  # type: ignore[no-untyped-call]
            unit = unit_rms(part.to(device))
            pairs.append((self.project_predecessors(unit).to(dtype), self.project_successors(unit).to(dtype)))
        self.predecessor_table, self.successor_table = (torch.cat(column) for column in zip(*pairs, strict=True))

    def project_predecessors(self, embedded: Tensor) -> Tensor:
        """A ē of rows [N, E] -> [N, R] fp32."""
        return F.linear(embedded, self.predecessor_projection.float())

    def project_successors(self, embedded: Tensor) -> Tensor:
        """B ē / √R of rows [N, E] -> [N, R] fp32."""
        return F.linear(embedded, self._scale * self.successor_projection.float())

    @property
    def successors(self) -> Tensor:
        assert self.successor_table is not None, "the drafter is attached to a target first"
        return self.successor_table

    def predecessors(self, hidden: Tensor, parents: Tensor) -> Tensor:
        assert self.predecessor_table is not None, "the drafter is attached to a target first"
        return factored(self.predecessor_table, self.hidden_projection(hidden), parents)

    def factors(self, hidden: Tensor, draft: Draft, blocks: Tensor) -> Factors:
        assert self.predecessor_table is not None, "the drafter is attached to a target first"
        return Factors(self.predecessor_table, self.successors, self.hidden_projection(hidden))


def unit_rms(embedded: Tensor) -> Tensor:
    """Rows [N, E] of an embedding in fp32, each divided by its RMS; rows of zeros stay."""
    wide = embedded.float()
    return wide / wide.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12)
