"""min-p, top-k and top-p as one threshold on the logits, found without sorting the vocabulary.

Each filter keeps a token by what outweighs it: top-k by the number of tokens with a larger logit, top-p by their
probability mass. The smallest logit that is kept is found digit by digit (radix select): four histograms of 256 bins,
whatever the vocabulary and the parameters. Masses are integers, so a sum depends neither on the order of its terms nor
on the batch, and the kept set equals the one that a sort gives, ties included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins.choice.parameters import SamplingTensors

# Shape letters: B requests, V vocabulary.

#: The likeliest token's mass; sums over a vocabulary of 2^20 stay below 2^63, and rounding below 2^-20 of the mass.
_UNIT = 2.0**40
_BINS = 256


def apply_filters(scaled_logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """[B, ..., V] -> -inf outside min-p, then top-k, then top-p (vLLM's order); the best token is always kept.

    Each filter works on the probabilities that the one before it left. Tokens that tie with the last one kept are kept,
    as by vLLM and transformers.
    """
    shape = (-1, *[1] * (scaled_logits.dim() - 1))
    key = _ascending(scaled_logits)
    best = scaled_logits.amax(-1, keepdim=True)
    kept = torch.ones_like(key, dtype=torch.bool)
    if sampling.any_min_p:
        min_p = sampling.min_p.view(shape)
        # where it is off, -inf itself: added to a best logit that has overflowed, log(0) would be NaN
        kept = scaled_logits >= (best + min_p.log()).where(min_p > 0, float("-inf"))
    if sampling.any_top_k:
        kept = kept & (key >= _threshold(key, kept.long(), sampling.top_k.view(shape)))
    if sampling.any_top_p:
        below = torch.where(scaled_logits == best, 0.0, scaled_logits - best)  # inf - inf would be NaN
        mass = ((below.exp() * _UNIT).long() + 1).where(kept, 0)
        total, top_p = mass.sum(-1, keepdim=True), sampling.top_p.view(shape)
        limit = (total * top_p.double()).ceil().long().clamp(min=1).where(top_p < 1, total + 1)
        kept = kept & (key >= _threshold(key, mass, limit))
    return scaled_logits.masked_fill(~kept, float("-inf"))


def _ascending(x: Tensor) -> Tensor:
    """Integers in the order of the floats: int32 of the same shape."""
    bits = (x + 0.0).view(torch.int32)  # + 0.0: -0.0 and 0.0 are one number
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _threshold(key: Tensor, weight: Tensor, limit: Tensor) -> Tensor:
    """The smallest key [..., 1] of which the larger keys weigh less than `limit` [..., 1], 1 or more.

    key [..., V] int32; weight [..., V] int64, 0 for tokens that are not candidates.
    """
    above = torch.zeros_like(limit)  # weight of the keys that are larger in the digits so far
    first = torch.full_like(limit, -(1 << 7), dtype=torch.int32)  # the smallest key that begins as the one looked for
    for shift in (24, 16, 8, 0):
        digit = ((key >> shift) - first).clamp_(-1, _BINS)  # at the ends: keys that begin otherwise
        bins = weight.new_zeros(*weight.shape[:-1], _BINS + 2).scatter_add_(-1, digit.add_(1).long(), weight)
        weights = bins[..., 1:-1]
        larger = above + weights.flip(-1).cumsum(-1).flip(-1) - weights
        chosen = ((weights > 0) & (larger < limit)).int().argmax(-1, keepdim=True)  # the first of equals
        above, found = larger.gather(-1, chosen), first + chosen.int()
        first = found << 8
    return found
