"""Training objectives: the loss of a batch of blocks, from the drafter's input to a weighted sum of named terms.

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

D-PACE's terms are sums over a block's slots, about 7 times as large as a mean at block 8: with it, chain needs 5 to
10 where it has 40 with decay.

D-PACE's weights with a = 0 are the gradient of chain: ∂R/∂log q_j = mean_k 1[k >= j] ∏_{i<=k} q_i. So combine
`chain` with a slot term: its gradient vanishes when the first q of a block are tiny.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.train.data.draws import first_errors
from d2sd.train.data.packing import Packed, moved
from d2sd.train.kinds import trained_kind
from d2sd.train.objectives.head import Head, HeadStats, Rows, head_stats_fused
from d2sd.train_recipe import Objective

# Shape letters: B sequences, A blocks of each, G block size γ, C candidate ids, V vocabulary, E hidden.

_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Candidates:
    """The ids over which logits are taken in one step, so that a large vocabulary costs little (sampled softmax).

    Frequent ids and the labels of the step are always among them; the others are represented by a new sample each step,
    whose logits are raised by log(others / drawn), so the softmax's denominator stays unbiased.
    """

    ids: Tensor  # [C] int64
    index: Tensor  # [V] int64, id -> index in `ids`; -1 if not a candidate
    head: Head

    @staticmethod
    def draw(
        head: Tensor, always: Tensor, negatives: int, dtype: torch.dtype, generator: torch.Generator
    ) -> Candidates:
        """head [V, E]; always [V] bool on the CPU; `negatives` of the other ids are drawn."""
        always_ids, others = always.nonzero()[:, 0], (~always).nonzero()[:, 0]
        if head.is_cuda and negatives >= _ALIGNED:  # kernels read whole rows of logits, aligned ones several at a time
            negatives -= (len(always_ids) + negatives) % _ALIGNED
        drawn = others[torch.randperm(len(others), generator=generator)[:negatives]]
        ids = torch.cat([always_ids, drawn])
        correction = torch.zeros(len(ids))
        if len(drawn):
            correction[len(always_ids) :] = math.log(len(others) / len(drawn))
        index = torch.full((len(always),), -1)
        index[ids] = torch.arange(len(ids))
        ids, index, correction = (moved(part, head.device) for part in (ids, index, correction))
        return Candidates(ids, index, Head(head[ids].to(dtype), correction))


class BlockLoss(nn.Module):
    """The drafter's loss as one module, so that DDP can wrap it."""

    def __init__(self, drafter: DraftModel, embedding: Tensor, wanted: Objective) -> None:
        """embedding [V, E]: the target's, frozen."""
        super().__init__()
        self.drafter, self.wanted = drafter, wanted
        self._embedding = embedding

    def forward(self, packed: Packed, visible: Tensor, rejected: Tensor, candidates: Candidates) -> dict[str, Tensor]:
        """Unweighted terms. visible [B, A]: length of each block's prefix of real tokens, anchor included.

        rejected [B, A]: the id masked out of slot `visible`, -1 for none.
        """
        size = packed.tokens.shape[-1]
        slots = torch.arange(size, device=visible.device)
        used = ((slots >= visible[..., None]) & packed.inside).flatten(0, 1)  # [B·A, G]
        rows = rows_of(packed, used)
        kind = trained_kind(self.drafter.config.kind)
        hidden = kind.hidden(self.drafter, self._embedding, packed, visible)
        added = None
        if kind.added is not None:
            added = kind.added(self.drafter, hidden, self._embedding, packed).of(rows, candidates.ids)
        labels = candidates.index[packed.tokens.flatten(0, 1)]
        banned = torch.where(slots == visible[..., None], rejected[..., None], -1).flatten()
        given = Rows(
            hidden.flatten(0, 2).index_select(0, rows),
            packed.target_hidden.flatten(0, 2)[rows],
            labels.flatten()[rows],
            candidates.head,
            torch.where(banned >= 0, candidates.index[banned.clamp(min=0)], -1)[rows],
            added,
        )
        stats = head_stats_fused(given)
        blocks = HeadStats(
            *(column.new_zeros(used.numel()).index_copy(0, rows, column).view_as(used) for column in stats)
        )
        return objective(blocks, labels, visible.flatten(), used, self.wanted)


def rows_of(packed: Packed, used: Tensor) -> Tensor:
    """The slots whose logits are taken: those `used [B·A, G]`. On a GPU all behind the anchor, of which visible ones
    have no weight: which are used is known there alone, and the host does not wait for it.
    """
    return packed.drafted if used.is_cuda else used.flatten().nonzero()[:, 0]


@torch.no_grad()
def first_rejections(
    first: DraftModel, embedding: Tensor, packed: Packed, candidates: Candidates
) -> tuple[Tensor, Tensor]:
    """First slot where the first drafter's greedy draft is wrong [B, A] (γ: none), and its token there [B, A]."""
    visible = torch.ones(packed.tokens.shape[:2], dtype=torch.long, device=packed.tokens.device)
    hidden: Tensor = trained_kind(first.config.kind).hidden(first, embedding, packed, visible)
    guess = candidates.ids[_best(first, hidden, packed, candidates)].view_as(packed.tokens)
    guess = torch.where(packed.inside, guess, packed.tokens)  # slots after the end count as correct
    errors = first_errors(guess.flatten(0, 1), packed.tokens.flatten(0, 1)).view_as(visible)
    drafted = guess.gather(-1, errors.clamp(max=guess.shape[-1] - 1)[..., None])[..., 0]
    return errors, drafted


def _best(first: DraftModel, hidden: Tensor, packed: Packed, candidates: Candidates) -> Tensor:
    """The first drafter's best candidate [B·A·G] of every slot: up to the first error, that behind a right token."""
    pairs, head, rows = first.head if isinstance(first, Drafter) else None, candidates.head, hidden.flatten(0, 2)
    if pairs is None:
        return head.best(rows)
    before = packed.tokens.roll(1, dims=-1).flatten()  # the anchor's slot drafts nothing
    of_parents = pairs.predecessors(rows, before[:, None])[:, 0].to(rows.dtype)
    rows = torch.cat([rows[:, : head.weight.shape[-1]], of_parents], -1)
    successors = pairs.successors[candidates.ids].to(head.weight.dtype)
    return Head(torch.cat([head.weight, successors], -1), head.correction).best(rows)


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
        out["chain"] = 1 - chain(stats.log_q, used, whole=wanted.chain_over == "block")
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


def chain(log_q: Tensor, used: Tensor, *, whole: bool = False) -> Tensor:
    """Expected share of the used slots that a chain sampled from q would have accepted: R in [0, 1]; with `whole`, of
    all slots behind the anchor, so that every slot of every block counts the same.

    Summed in log space, so that the gradient of long blocks does not underflow as in a product.
    """
    reached = torch.where(used, log_q, 0.0).cumsum(1).exp()
    slots = used.shape[1] - 1 if whole else used.sum(1).clamp(min=1)
    share = (reached * used).sum(1) / slots
    return share.sum() / used.any(1).sum().clamp(min=1)
