"""Prefix lengths for the training of a second drafter.

- Variable prefix (D²SD, arXiv 2606.04446 Eq. 6-7): n visible tokens, anchor included, Pr(n) ∝ base^n. We draw n from
  {1, …, γ-1}: the published code leaves n = 1 out although inference picks boundary 0.
- Rejection-conditioned variable prefix (ours): a second drafter only ever runs from a position whose first-draft token
  is assumed rejected. So for a share of the blocks n is the first slot where the first draft is wrong, and the rejected
  token is masked out of that slot's softmax, as at inference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from d2sd.train_recipe import SecondSettings

# Shape letters: B sequences, A blocks of each, G block size γ.


def draw_prefixes(count: int, block_size: int, base: float, generator: torch.Generator) -> Tensor:
    """[count] int64 numbers of visible tokens n in {1, …, γ-1} with Pr(n) ∝ base^n."""
    weights = base ** torch.arange(1, block_size, dtype=torch.float32)
    return 1 + torch.multinomial(weights, count, replacement=True, generator=generator)


def first_errors(drafted: Tensor, tokens: Tensor) -> Tensor:
    """First slot >= 1 where the draft [A, G] differs from the real tokens [A, G]; γ if none differs. Returns [A]."""
    wrong = drafted != tokens
    wrong[:, 0] = False
    return torch.where(wrong.any(1), wrong.int().argmax(1), tokens.shape[1])


def choose_prefixes(
    errors: Tensor, drafted: Tensor, block_size: int, settings: SecondSettings, generators: Sequence[torch.Generator]
) -> tuple[Tensor, Tensor]:
    """(prefix length of each block [B, A], the id masked in the slot after it, -1 for none [B, A]).

    errors, drafted [B, A]: first slot where the first drafter is wrong (γ: none), and its token there. Each sequence's
    generator draws once per block, so results do not depend on how sequences are batched.
    """
    width, device = errors.shape[1], errors.device
    drawn = torch.stack([draw_prefixes(settings.blocks, block_size, settings.prefix_base, g) for g in generators])
    chance = torch.stack([torch.rand(settings.blocks, generator=g) for g in generators])
    take = (chance[:, :width] < settings.on_rejection).to(device) & (errors < block_size)
    banned = take & settings.mask_rejected
    return torch.where(take, errors, drawn[:, :width].to(device)), torch.where(banned, drafted, -1)
