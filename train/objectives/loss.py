"""The loss of a batch of blocks: drafter input, drafter forward pass, objective."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from d2sd.modeling.drafters.interface import DraftModel
from d2sd.train.data.packing import Packed
from d2sd.train.data.prefixes import first_errors
from d2sd.train.kinds import trained_kind
from d2sd.train.objectives.head import Head, HeadStats, head_stats_fused
from d2sd.train.objectives.terms import objective
from d2sd.train_recipe import Objective

# Shape letters: B sequences, A blocks of each, G block size γ, C candidate ids, V vocabulary, E hidden.


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
        kept, others = always.nonzero()[:, 0], (~always).nonzero()[:, 0]
        drawn = others[torch.randperm(len(others), generator=generator)[:negatives]]
        ids = torch.cat([kept, drawn])
        correction = torch.zeros(len(ids))
        if len(drawn):
            correction[len(kept) :] = math.log(len(others) / len(drawn))
        index = torch.full((len(always),), -1)
        index[ids] = torch.arange(len(ids))
        device = head.device
        weight = head[ids.to(device)].to(dtype)
        return Candidates(ids.to(device), index.to(device), Head(weight, correction.to(device)))


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
        kind = trained_kind(self.drafter)
        hidden = kind.hidden(self.drafter, self._embedding, packed, visible)
        added = None
        if kind.added is not None:
            added = kind.added(self.drafter, hidden, self._embedding, packed).of(used, candidates.ids)
        hidden = hidden.flatten(0, 1)
        labels = candidates.index[packed.tokens.flatten(0, 1)]
        banned = torch.where(slots == visible[..., None], rejected[..., None], -1).flatten(0, 1)
        stats = head_stats_fused(
            hidden[used], packed.target_hidden.flatten(0, 1)[used], labels[used], candidates.head,
            torch.where(banned >= 0, candidates.index[banned.clamp(min=0)], -1)[used], added,
        )  # fmt: skip
        spread = (torch.zeros(used.shape, dtype=column.dtype, device=used.device) for column in stats)
        blocks = HeadStats(*(out.masked_scatter(used, column) for out, column in zip(spread, stats, strict=True)))
        return objective(blocks, labels, visible.flatten(), used, self.wanted)


@torch.no_grad()
def first_rejections(
    first: DraftModel, embedding: Tensor, packed: Packed, candidates: Candidates
) -> tuple[Tensor, Tensor]:
    """First slot where the first drafter's greedy draft is wrong [B, A] (γ: none), and its token there [B, A]."""
    visible = torch.ones(packed.tokens.shape[:2], dtype=torch.long, device=packed.tokens.device)
    hidden: Tensor = trained_kind(first).hidden(first, embedding, packed, visible)
    guess = candidates.ids[candidates.head.best(hidden.flatten(0, 2))].view_as(packed.tokens)
    guess = torch.where(packed.inside, guess, packed.tokens)  # slots after the end count as correct
    errors = first_errors(guess.flatten(0, 1), packed.tokens.flatten(0, 1)).view_as(visible)
    drafted = guess.gather(-1, errors.clamp(max=guess.shape[-1] - 1)[..., None])[..., 0]
    return errors, drafted
