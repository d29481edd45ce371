"""Training objectives: named terms over the slots of a block, summed with the weights of the recipe.

Slot terms, a weighted mean over slots (p the target's distribution, q the drafter's, y the response's token):

    ce     -log q(y)
    kl     KL(p ‖ q): distillation; over all candidate ids, so no top-k of p is stored
    tv     1 - Σ min(p, q), one minus the acceptance rate of rejection sampling       LK, arXiv 2602.23881
    nla    -log Σ min(p, q)                                                           the same
    lk     λ kl + (1 - λ) tv with λ = exp(-3 Σ min(p, q)), detached                   the same, its hybrid

Block terms:

    focal  -log q(y) at the block's first wrong slot only                             arXiv 2606.11552
    chain  1 - R with R = mean_k ∏_{j<=k} q_j(y_j): the accepted share, differentiable   the same

Slot weights, at distance d = k - n after n visible tokens:

    uniform  1
    decay    exp(-d / decay)                                                          DFlash, D²SD
    dpace    Σ_{k>=j} ∏_{i<=k} (a + (1 - a) q_i(y_i)), detached                       D-PACE, arXiv 2605.18810

D-PACE's weights with a = 0 are the gradient of chain: ∂R/∂log q_j = mean_k 1[k >= j] ∏_{i<=k} q_i. So combine
`chain` with a slot term: its gradient vanishes when the first q of a block are tiny.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.train.objectives.head import HeadStats
from d2sd.train_recipe import Objective

# Shape letters: A blocks, G block size γ. `used [A, G]` marks the slots that are trained: after the visible tokens and
# inside the sequence.


def objective(stats: HeadStats, labels: Tensor, visible: Tensor, used: Tensor, wanted: Objective) -> dict[str, Tensor]:
    """Every wanted term, unweighted, a scalar each. `stats` hold [A, G] each, as do labels (indices, like `guess`)."""
    weights = slot_weights(stats.log_q.detach(), visible, used, wanted)
    norm = weights.sum().clamp(min=1e-6)
    if wanted.slots == "dpace":  # not normalised per slot: D-PACE gives blocks with high q more weight
        norm = used.any(1).sum().clamp(min=1)
    log_overlap = stats.overlap.clamp(min=1e-5).log()
    kl, tv = stats.cross - stats.entropy, 1 - stats.overlap
    share = torch.exp(-3 * stats.overlap.detach())
    slot_terms = {"ce": -stats.log_q, "kl": kl, "tv": tv, "nla": -log_overlap, "lk": share * kl + (1 - share) * tv}
    out = {name: (term * weights).sum() / norm for name, term in slot_terms.items() if getattr(wanted, name)}
    if wanted.focal:
        out["focal"] = focal(stats.log_q, weights, used & (stats.guess != labels))
    if wanted.chain:
        out["chain"] = 1 - chain(stats.log_q, used)
    return out


def slot_weights(log_q: Tensor, visible: Tensor, used: Tensor, wanted: Objective) -> Tensor:
    """[A, G], zero where not `used`. visible [A]: length of each block's prefix of real tokens, anchor included."""
    if wanted.slots == "dpace":
        smooth = torch.where(used, wanted.smoothing + (1 - wanted.smoothing) * log_q.exp(), 1.0)
        reached = smooth.cumprod(1) * used
        return reached.flip(1).cumsum(1).flip(1) * used
    if wanted.slots == "uniform":
        return used.float()
    distance = torch.arange(used.shape[1], device=used.device) - visible[:, None]
    return torch.exp(-distance.clamp(min=0) / wanted.decay) * used


def focal(log_q: Tensor, weights: Tensor, wrong: Tensor) -> Tensor:
    """Weighted mean of -log q over each block's first wrong slot; all [A, G]."""
    weights = weights * (wrong & (wrong.cumsum(1) == 1))
    return -(log_q * weights).sum() / weights.sum().clamp(min=1e-6)


def chain(log_q: Tensor, used: Tensor) -> Tensor:
    """Expected share of the used slots that a chain sampled from q would have accepted: R in [0, 1].

    Summed in log space, so that the gradient of long blocks does not underflow as in a product.
    """
    reached = torch.where(used, log_q, 0.0).cumsum(1).exp()
    share = (reached * used).sum(1) / used.sum(1).clamp(min=1)
    return share.sum() / used.any(1).sum().clamp(min=1)
