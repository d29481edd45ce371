"""The loss of a batch of blocks: drafter input, drafter forward pass, objective."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.train.data.packing import Packed, attend_packed
from d2sd.train.data.prefixes import first_errors
from d2sd.train.sparse_attention import attend_sparse
from d2sd.train.objectives.head import Added, Head, HeadStats, head_stats_fused
from d2sd.train.objectives.terms import objective
from d2sd.train_recipe import Objective

# Shape letters: B sequences, A blocks of each, G block size γ, C candidate ids, V vocabulary, E hidden.


#: Attention scores of a layer above which a GPU uses FlexAttention, which stores none: 2 GB of fp32. Below,
#: `attend_packed` is as fast, and its gradients are tested.
_SCORES = 1 << 29


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

    def __init__(self, drafter: Drafter | FlexHead, embedding: Tensor, wanted: Objective) -> None:
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
        added = None
        if isinstance(self.drafter, FlexHead):
            hidden, inner = flex_hidden(self.drafter, self._embedding, packed)
            last = self.drafter.calibration.outer
            added = Added(inner.flatten(0, 1)[used], last.weight[candidates.ids], last.bias[candidates.ids])
        else:
            hidden = block_hidden(self.drafter, self._embedding, packed, visible)
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


def block_hidden(drafter: Drafter, embedding: Tensor, packed: Packed, visible: Tensor) -> Tensor:
    """[B, A, G, E]: hidden states of the drafter; each block has `visible [B, A]` real tokens, then mask tokens."""
    slots = torch.arange(packed.tokens.shape[-1], device=visible.device)
    tokens = torch.where(slots < visible[..., None], packed.tokens, drafter.config.mask_token_id)
    # The target's tensors may be bf16; the drafter is fp32, and only autocast changes the dtype of its products.
    features, embedded = packed.features.float(), F.embedding(tokens, embedding).float()
    scores = tokens.numel() * drafter.config.body.num_heads * (features.shape[1] + tokens.shape[-1])
    fused = features.is_cuda and scores > _SCORES
    attend = (attend_sparse if fused else attend_packed)(drafter, features, packed.positions)
    hidden: Tensor = drafter(embedded.flatten(1, 2), packed.positions.flatten(1), attend)
    return hidden.view(*tokens.shape, -1)


def flex_hidden(head: FlexHead, embedding: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """[B, A, G, E] and [B, A, G, R]: hidden states of the mask rows, and their calibration before its last layer."""
    attend = attend_packed(head, packed.features, packed.positions)
    anchor = F.embedding(packed.tokens[:, :, 0], embedding).float()
    x = head.blocks(anchor).flatten(1, 2)
    hidden: Tensor = head(x, packed.positions.flatten(1), attend).view(*packed.tokens.shape, -1)
    return hidden, head.calibration_inner(hidden, anchor[:, :, None])


@torch.no_grad()
def first_rejections(
    first: Drafter, embedding: Tensor, packed: Packed, candidates: Candidates
) -> tuple[Tensor, Tensor]:
    """First slot where the first drafter's greedy draft is wrong [B, A] (γ: none), and its token there [B, A]."""
    visible = torch.ones(packed.tokens.shape[:2], dtype=torch.long, device=packed.tokens.device)
    hidden = block_hidden(first, embedding, packed, visible)
    guess = candidates.ids[candidates.head.best(hidden.flatten(0, 2))].view_as(packed.tokens)
    guess = torch.where(packed.inside, guess, packed.tokens)  # slots after the end count as correct
    errors = first_errors(guess.flatten(0, 1), packed.tokens.flatten(0, 1)).view_as(visible)
    drafted = guess.gather(-1, errors.clamp(max=guess.shape[-1] - 1)[..., None])[..., 0]
    return errors, drafted
