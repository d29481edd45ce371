"""From logits to tokens in plain PyTorch: the target's choice after a row, and the candidates of a draft.

argmax(logits / T + gumbel) is an exact sample of softmax(logits / T).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from d2sd.plugins.choice.filters import apply_filters
from d2sd.plugins.choice.parameters import SamplingTensors
from d2sd.plugins.choice.philox import gumbel, gumbel_at
from d2sd.plugins.trees.types import Draft
from d2sd.token_codes import NOT_FINITE

# Shape letters: B requests, K branches, S slots, N nodes, M candidates a slot, V vocabulary, Vd draft vocabulary.

#: Likeliest tokens of a slot that a sampled draft re-ranks with the target's Gumbel noise.
CANDIDATE_POOL = 64


def best_token(scores: Tensor) -> Tensor:
    """scores [..., V] -> [...]: the first of the best tokens; `NOT_FINITE` where its score is NaN or infinite.

    NaN counts as the largest, so one anywhere in a row is noticed.
    """
    best, token = scores.max(-1)
    return token.where(best.isfinite(), NOT_FINITE)


def sampled_scores(logits: Tensor, sampling: SamplingTensors, noise: Tensor) -> Tensor:
    """Scores [B, ..., V] whose argmax is the choice: logits [B, ..., V] fp32 and Gumbel noise of that shape."""
    shape = (-1, *[1] * (logits.dim() - 1))
    temperature = sampling.temperature.view(shape)
    random = temperature > 0
    scaled_logits = logits / torch.where(random, temperature, 1.0)
    if sampling.any_filter:
        scaled_logits = apply_filters(scaled_logits, sampling)
    return torch.where(random, scaled_logits + noise, logits)


def choose_reference(logits: Tensor, context_len: Tensor, depth: Tensor, sampling: SamplingTensors) -> Tensor:
    """`choose` in PyTorch: the specification."""
    logits = logits.float()
    if not sampling.any_sampled:
        return best_token(logits)
    noise = gumbel(sampling.seed, context_len[:, None] + 1 + depth, logits.shape[-1])
    return best_token(sampled_scores(logits, sampling, noise))


def pool_size_of(logits: Tensor, sampling: SamplingTensors, width: int) -> int:
    """Likeliest tokens of a slot that `candidates` looks at."""
    return min(width if sampling.is_argmax else CANDIDATE_POOL, logits.shape[-1])


def candidates_reference(
    logits: Tensor, context_len: Tensor, sampling: SamplingTensors, width: int, ids: Tensor | None = None
) -> Draft:
    """`candidates` in PyTorch: the specification."""
    logits = logits.float()
    pool, tokens = logits.topk(pool_size_of(logits, sampling, width), dim=-1)
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
        slots = torch.arange(logits.shape[2], device=logits.device)
        position = (context_len[:, None, None, None] + 1 + slots[:, None]).expand_as(tokens)
        scores = sampled_scores(pool, sampling, gumbel_at(sampling.seed, position, tokens))
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        tokens = tokens.gather(-1, order)
        random = (sampling.temperature > 0)[:, None, None, None]
        total = torch.where(random, scores.logsumexp(-1, keepdim=True), total)
    width = min(width, logits.shape[-1])
    # overflow in a drafter must only lower its acceptance: NaN becomes "no proposal"
    logprob = (scores - total)[..., :width].nan_to_num(-math.inf, neginf=-math.inf)
    return Draft(tokens[..., :width], logprob)
