"""Drafts: the best candidates of every slot after an anchor, and the blocks that a second pass restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from d2sd.plugins import choice, trees
from d2sd.runtime.sampling.filters import apply_filters
from d2sd.runtime.sampling.philox import gumbel_at
from d2sd.runtime.sampling.sample import Sampling

# Shape letters: B requests, K branches, S = γ - 1 slots after the anchor, M candidates a slot, V vocabulary, Vd draft
# vocabulary: logits [..., Vd] belong to the ascending `ids [Vd]`. Tokens are the target's ids everywhere.

#: Candidates of every slot in policies that draft siblings.
WIDTH = 16
#: Likeliest tokens of a slot that a sampled draft re-ranks with the target's Gumbel noise.
CANDIDATE_POOL = 64


@dataclass(frozen=True, slots=True)
class Draft:
    """Slot s proposes tokens for position anchor + 1 + s."""

    tokens: Tensor  # [B, (K,) S, M] int64, best first
    logprob: Tensor  # [B, (K,) S, M] fp32: of acceptance, given that all tokens before it are; -inf: no proposal

    @property
    def top1(self) -> Tensor:
        """The likeliest token of every slot, [B, (K,) S]."""
        return self.tokens[..., 0]

    @property
    def confidence(self) -> Tensor:
        """Log-probability of the likeliest token of every slot, [B, (K,) S]."""
        return self.logprob[..., 0]

    def chain(self, row: int) -> list[int]:
        """The likeliest tokens of request `row` (of a first pass, [B, S, M]), up to the first slot without a proposal.

        Reads both tensors back to the host.
        """
        tokens: list[int] = self.top1[row].tolist()
        confidence: list[float] = self.confidence[row].tolist()
        return tokens[: next((slot for slot, score in enumerate(confidence) if score == -math.inf), len(tokens))]


@dataclass(frozen=True, slots=True)
class Branches:
    """Restart points of the second pass: after the anchor and `prefix_len` tokens taken from the first pass."""

    tokens: Tensor  # [B, K, S] int64; those past `prefix_len` are unused
    prefix_len: Tensor  # [B, K] int64, 0 .. S; at S nothing is left to draft
    rejected: Tensor  # [B, K] int64, the token presumed rejected in slot `prefix_len`; -1: none

    def blocks(self, anchor: Tensor, mask_token_id: int) -> Tensor:
        """The drafter's input [B, K, γ]: anchor, kept tokens, masks."""
        if trees.use_kernels(anchor):
            from d2sd.plugins.trees.triton.launch import blocks_triton

            return blocks_triton(anchor, self.tokens, self.prefix_len, mask_token_id)
        slots = torch.arange(self.tokens.shape[-1], device=anchor.device)
        kept = torch.where(slots < self.prefix_len[..., None], self.tokens, mask_token_id)
        return torch.cat([anchor[:, None, None].expand(-1, kept.shape[1], 1), kept], dim=-1)

    def mask_rejected(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        """Mask each branch's rejected token in slot `prefix_len` of logits [B, K, S, V or Vd], in place.

        A rejected token outside the draft vocabulary needs no mask.
        """
        if trees.use_kernels(logits) and logits.is_contiguous():
            from d2sd.plugins.trees.triton.launch import mask_rejected_triton

            mask_rejected_triton(logits, self.rejected, self.prefix_len, ids)
            return logits
        rejected = self.rejected if ids is None else index_in_vocab(ids, self.rejected)
        b = torch.arange(len(logits), device=logits.device)[:, None]
        k = torch.arange(logits.shape[1], device=logits.device)
        index = b, k, self.prefix_len.clamp(max=logits.shape[2] - 1), rejected.clamp(min=0)
        logits[index] = logits[index].masked_fill(rejected >= 0, float("-inf"))
        return logits

    def splice(self, second: Draft) -> Tensor:
        """Full candidates [B, K, S]: kept tokens, then the second pass's best."""
        slots = torch.arange(self.tokens.shape[-1], device=self.tokens.device)
        return torch.where(slots < self.prefix_len[..., None], self.tokens, second.top1)


def index_in_vocab(ids: Tensor, tokens: Tensor) -> Tensor:
    """Index of each token in the ascending `ids` [Vd]; -1 if it is missing."""
    index = torch.searchsorted(ids, tokens.contiguous()).clamp(max=len(ids) - 1)
    return index.where(ids[index] == tokens, -1)


def candidates(logits: Tensor, context_len: Tensor, sampling: Sampling, width: int, ids: Tensor | None = None) -> Draft:
    """The `width` likeliest tokens of every slot: logits [B, K, S, V or Vd] -> [B, K, S, M].

    When the target samples, it takes argmax(logits / T + g) with noise g that depends on seed, position and token
    alone. Drafts are ranked by scores with the same g ("drafter-invariant" coupling, Daliri et al., arXiv 2408.07978):
    the output does not change, and more drafts are accepted. Penalties, filters and noise are applied to the
    CANDIDATE_POOL likeliest tokens only. Probabilities are normalised over the draft vocabulary.
    """
    size = logits.shape[-1]
    pool_size = min(width if sampling.is_argmax else CANDIDATE_POOL, size)
    if not sampling.changes_logits and choice.use_kernels(logits):
        from d2sd.plugins.choice.triton.launch import candidates_triton

        sampled = sampling if sampling.any_sampled else None
        return Draft(*candidates_triton(logits, context_len, min(width, size), pool_size, ids, sampled))
    logits = logits.float()
    pool, tokens = logits.topk(pool_size, dim=-1)
    if ids is not None:
        tokens = ids[tokens]
    total = logits.logsumexp(-1, keepdim=True)
    if sampling.changes_logits:
        changed = sampling.change_at(pool, context_len, tokens)
        others = total + torch.log1p(-(pool - total).exp().sum(-1, keepdim=True).clamp(max=1))
        new_total = torch.logaddexp(others, changed.logsumexp(-1, keepdim=True))
        total = new_total.where((changed != pool).any(-1, keepdim=True), total)
        pool, order = changed.sort(dim=-1, descending=True, stable=True)
        tokens = tokens.gather(-1, order)
    scores = pool
    if sampling.any_sampled:
        random = (sampling.temperature > 0)[:, None, None, None]
        scaled_logits = pool / torch.where(random, sampling.temperature[:, None, None, None], 1.0)
        if sampling.any_filter:
            scaled_logits = apply_filters(scaled_logits, sampling)
        slots = torch.arange(logits.shape[2], device=logits.device)
        position = (context_len[:, None, None, None] + 1 + slots[:, None]).expand_as(tokens)
        scores = torch.where(random, scaled_logits + gumbel_at(sampling.seed, position, tokens), pool)
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        tokens = tokens.gather(-1, order)
        total = torch.where(random, scores.logsumexp(-1, keepdim=True), total)
    width = min(width, size)
    # overflow in a drafter must only lower its acceptance: NaN becomes "no proposal"
    logprob = (scores - total)[..., :width].nan_to_num(-math.inf, neginf=-math.inf)
    return Draft(tokens[..., :width], logprob)
