"""The head of DSpark (DeepSeek-AI, "Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation"): a
bigram table of low rank, over a DFlash body.

    vanilla    δ(p, c) = W2[c] · W1[p]
    gated      δ(p, c) = W2[c] · (σ(gate([h; W1[p]])) ⊙ W1[p])        h: the slot's hidden state

The third form, `rnn`, carries a state from slot to slot: it is not of first order, and not run here. The network that
says how likely each slot is accepted is kept in checkpoints and not run: probabilities are calibrated
(`d2sd.runtime.speculation.calibration`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from d2sd.modeling.drafters.head_configs import MarkovConfig
from d2sd.modeling.drafters.heads import Head
from d2sd.plugins.pair_scores import Factors
from d2sd.plugins.trees.types import Draft

# Shape letters: E hidden, R rank, V vocabulary, M candidates a slot, P parents of a slot.

#: Candidates of a slot. The head adds to all logits of a slot; what it may lift is looked for among these.
POOL = 32


class MarkovHead(Head):
    """Rows of its tables are the target's ids, of a reduced draft vocabulary too."""

    pool = POOL

    def __init__(self, config: MarkovConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, config.rank)
        self.markov_w2 = nn.Embedding(vocab_size, config.rank)  # a product with few of its rows
        self.gate_proj = nn.Linear(hidden_size + config.rank, config.rank) if config.gated else None

    @property
    def successors(self) -> Tensor:
        return self.markov_w2.weight

    def predecessors(self, hidden: Tensor, parents: Tensor) -> Tensor:
        of_parents: Tensor = self.markov_w1(parents)  # [..., P, R]
        if self.gate_proj is not None:
            shared = hidden[..., None, :].expand(*of_parents.shape[:-1], -1)
            of_parents = torch.sigmoid(self.gate_proj(torch.cat([shared, of_parents], -1))) * of_parents
        return of_parents

    def factors(self, hidden: Tensor, draft: Draft, blocks: Tensor) -> Factors:
        if self.gate_proj is not None:
            return super().factors(hidden, draft, blocks)
        return Factors(self.markov_w1.weight, self.successors)


class ConfidenceHead(nn.Module):
    """Predicts whether a slot is accepted. Not run."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)
