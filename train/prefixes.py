"""How many tokens of a block a second drafter is shown in training.

- Variable prefix (D²SD, arXiv 2606.04446 Eq. 6-7): n visible tokens, anchor included, Pr(n) ∝ base^n. We draw n from
  {1, …, γ-1}: the published code leaves n = 1 out although inference picks boundary 0.
- Rejection-conditioned variable prefix (ours): a second drafter only ever runs at places where the first draft's token
  is assumed wrong, so a share of the blocks takes as n the slot where the first draft really goes wrong, and the
  rejected token is left out of that slot's softmax, as at inference.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Shape letters: A blocks, G block size γ.


def draw_prefixes(count: int, block_size: int, base: float, generator: torch.Generator) -> Tensor:
    """[count] int64 numbers of visible tokens n in {1, …, γ-1} with Pr(n) ∝ base^n."""
    weights = base ** torch.arange(1, block_size, dtype=torch.float32)
    return 1 + torch.multinomial(weights, count, replacement=True, generator=generator)


def first_errors(drafted: Tensor, tokens: Tensor) -> Tensor:
    """First slot >= 1 where the draft [A, G] differs from the real tokens [A, G]; γ where it never does."""
    wrong = drafted != tokens
    wrong[:, 0] = False
    return torch.where(wrong.any(1), wrong.int().argmax(1), tokens.shape[1])
