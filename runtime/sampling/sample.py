"""The target's token at every row: argmax, or Gumbel-max over the filtered distribution.

argmax(logits / T + gumbel) is an exact sample of softmax(logits / T). Drafts never change the tokens chosen here, only
how many of them one step commits.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from d2sd.runtime.request import SamplingParams
from d2sd.runtime.sampling.philox import gumbel

# Shape letters: B requests, T rows, D distinct depths, V vocabulary.


#: Lower temperatures decode greedily: logits / T would overflow, and the noise no longer changes the argmax.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a batch; the two flags choose between static variants of the computation."""

    temperature: Tensor  # [B] fp32, 0 where greedy
    top_p: Tensor  # [B] fp32, infinite where off: cumulative probabilities may round to more than 1
    top_k: Tensor  # [B] int64, V where off
    seed: Tensor  # [B] int64
    any_sampled: bool
    any_filter: bool

    @staticmethod
    def of(params: SequenceOf[SamplingParams], vocab_size: int, device: str) -> Sampling:
        signed = [p.seed - 2**64 if p.seed >= 2**63 else p.seed for p in params]  # the same 64 bits
        return Sampling(
            temperature=torch.tensor(
                [p.temperature if p.temperature >= GREEDY_BELOW else 0.0 for p in params],
                dtype=torch.float32,
                device=device,
            ),
            top_p=torch.tensor(
                [p.top_p if p.top_p < 1 else torch.inf for p in params], dtype=torch.float32, device=device
            ),
            top_k=torch.tensor([p.top_k or vocab_size for p in params], device=device),
            seed=torch.tensor(signed, device=device),
            any_sampled=any(p.temperature >= GREEDY_BELOW for p in params),
            any_filter=any(p.temperature >= GREEDY_BELOW and (p.top_p < 1 or p.top_k) for p in params),
        )


def sample_target(logits: Tensor, depth: Tensor, context_len: Tensor, depths: int, sampling: Sampling) -> Tensor:
    """The token the target chooses after each row.

    logits [B, T, V] fp32; depth [B, T] in 0 .. depths - 1: row t is at position context_len + depth and chooses the
    token at the next position. Returns [B, T] int64.
    """
    if not sampling.any_sampled:
        return logits.argmax(-1)
    scores = gumbel_scores(logits, depth, context_len, depths, sampling)
    return scores.argmax(-1)


def gumbel_scores(logits: Tensor, depth: Tensor, context_len: Tensor, depths: int, sampling: Sampling) -> Tensor:
    """Scores [B, T, V] that `sample_target` takes the argmax of: logits in greedy rows, else scaled logits + noise."""
    random = sampling.temperature > 0
    scaled_logits = logits / torch.where(random, sampling.temperature, 1.0)[:, None, None]
    if sampling.any_filter:
        scaled_logits = apply_top_k_top_p(scaled_logits, sampling)
    positions = context_len[:, None] + 1 + torch.arange(depths, device=logits.device)
    noise = gumbel(sampling.seed, positions, logits.shape[-1])  # [B, D, V]: siblings share it
    noise = noise.gather(1, depth[..., None].expand(-1, -1, logits.shape[-1]))
    return torch.where(random[:, None, None], scaled_logits + noise, logits)


def apply_top_k_top_p(scaled_logits: Tensor, sampling: Sampling) -> Tensor:
    """[B, T, V] -> -inf outside the top-k and outside the smallest set whose probability reaches top-p; the best
    token is always kept.
    """
    ranked = scaled_logits.sort(-1, descending=True).values
    rank = torch.arange(scaled_logits.shape[-1], device=scaled_logits.device)
    within_k = rank < sampling.top_k[:, None, None]
    weights = ranked.masked_fill(~within_k, float("-inf")).softmax(-1)
    before = weights.cumsum(-1) - weights
    keep = within_k & (before < sampling.top_p[:, None, None])
    keep[..., 0] = True
    threshold = ranked.masked_fill(~keep, float("inf")).amin(-1, keepdim=True)
    return scaled_logits.masked_fill(scaled_logits < threshold, float("-inf"))
