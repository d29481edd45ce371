"""What the drafters are trained on: soft labels from the target, weighted by slot.

- DFlash (arXiv 2602.06036): w_k = exp(-(k-1)/decay) for k >= 1; slot 0 is the visible anchor.
- Variable prefix (D²SD, arXiv 2606.04446 Eq. 6-7): n visible tokens, anchor included, Pr(n) ∝ base^n;
  w_k = exp(-(k-n)/decay) for k >= n. We draw n from {1, …, γ-1}: the published code leaves n = 1 out although
  inference picks boundary 0.
- Rejection-conditioned variable prefix (ours): a second drafter only ever runs at places where the first draft's
  token is assumed wrong, so a share of the blocks takes as n the slot where the first draft really goes wrong, and
  the rejected token is left out of that slot's softmax, as at inference.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Shape letters: A blocks, G block size γ, C candidate tokens (a vocabulary or a part of it).


def slot_weights(visible: Tensor, block_size: int, decay: float) -> Tensor:
    """visible [A]: real tokens at the head of each block, anchor included. Returns [A, G], zero on visible slots."""
    past = torch.arange(block_size, device=visible.device) - visible[:, None]
    return torch.where(past >= 0, torch.exp(-past.clamp(min=0) / decay), 0.0)


def draw_prefixes(count: int, block_size: int, base: float, generator: torch.Generator) -> Tensor:
    """[count] int64 numbers of visible tokens n in {1, …, γ-1} with Pr(n) ∝ base^n."""
    weights = base ** torch.arange(1, block_size, dtype=torch.float32)
    return 1 + torch.multinomial(weights, count, replacement=True, generator=generator)


def first_errors(drafted: Tensor, tokens: Tensor) -> Tensor:
    """First slot >= 1 where the draft [A, G] differs from the real tokens [A, G]; γ where it never does."""
    wrong = drafted != tokens
    wrong[:, 0] = False
    return torch.where(wrong.any(1), wrong.int().argmax(1), tokens.shape[1])


def soft_cross_entropy(logits: Tensor, target_logits: Tensor, labels: Tensor, hard: float) -> Tensor:
    """Cross-entropy with a mixed label: `hard` on the real token, the rest spread as the target's distribution.

    logits, target_logits [..., C]; labels [...] indices into C. Returns [...] nats. With hard = 0 its gradient is
    that of KL(target ‖ drafter).
    """
    log_q = logits.float().log_softmax(-1)
    soft = -(target_logits.float().softmax(-1) * log_q.masked_fill(log_q.isneginf(), 0)).sum(-1)
    return (1 - hard) * soft - hard * log_q.gather(-1, labels[..., None])[..., 0]
