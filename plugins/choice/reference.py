"""From logits to tokens in plain PyTorch: the target's choice after a row, and the candidates of a draft.

argmax(logits / T + gumbel) is an exact sample of softmax(logits / T).

Noise is a function of (seed, position, token): without generator state, the order of calls has no effect. Philox4x32-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is the generator of cuRAND, PyTorch on CUDA and
`triton.language.philox`. Key = the 64-bit seed; counter = (token // 4, position, 0, 0); word token % 4 is the token's.
All rows at one position share their noise, so the target chooses the same token in every tree.

min-p, top-k and top-p are one threshold on the logits, found without sorting the vocabulary. Each keeps a token by what
outweighs it: top-k by the number of tokens with a larger logit, top-p by their probability mass. The smallest logit
that is kept is found digit by digit (radix select): four histograms of 256 bins, whatever the vocabulary and the
parameters. Masses are integers, so a sum depends neither on the order of its terms nor on the batch, and the kept set
equals the one that a sort gives, ties included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from d2sd.plugins.dispatch import REFERENCE, TRITON, Implementation, op, pick
from d2sd.plugins.trees.reference.branches import mask_rejected
from d2sd.plugins.trees.types import Branches, Draft
from d2sd.token_codes import NOT_FINITE

# Shape letters: B requests, K branches, S slots, D depths, N nodes, M candidates a slot, V vocabulary, Vd draft
# vocabulary: logits [..., Vd] belong to the ascending `ids [Vd]`. Tokens are the target's ids everywhere.

OP = "the choice of tokens"
#: Candidates of every slot in policies that draft siblings.
WIDTH = 16

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds on 32-bit words in int64; tensors broadcast. Products wrap, but both 32-bit halves stay exact."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (high >> 32 & _LOW) ^ c1 ^ k0, high & _LOW, (low >> 32 & _LOW) ^ c3 ^ k1, low & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def gumbel(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """seed [B], position [B, D], both int64 (a seed's 64 bits) -> Gumbel(0, 1) noise [B, D, V] in fp32."""
    quads = torch.arange((vocab_size + 3) // 4, device=seed.device)
    key = ((seed & _LOW)[:, None, None], (seed >> 32 & _LOW)[:, None, None])
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    words = philox(key, (quads, position[..., None], zero, zero))
    return _gumbel(torch.stack(words, dim=-1).flatten(-2)[..., :vocab_size])


def gumbel_at(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """The same noise for single tokens: seed [B], position and token [B, ...] of one shape -> fp32 of that shape."""
    seed = seed.view(-1, *[1] * (token.dim() - 1))
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    words = philox((seed & _LOW, seed >> 32 & _LOW), (token // 4, position, zero, zero))
    return _gumbel(torch.stack(words, dim=-1).gather(-1, (token % 4)[..., None])[..., 0])


def _gumbel(bits: Tensor) -> Tensor:
    # 23 bits plus one half are exact in fp32, so 0 and 1 are never reached and the noise stays finite.
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -(-uniform.log()).log()


#: Filters, each a field of `SamplingTensors` and of `SamplingParams`, and an argument of the kernels that filter.
FILTERS = ("min_p", "top_k", "top_p")


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """One value a request; the flags choose between static variants.

    A subclass may also change the logits, by the text (`changes_logits`): then no kernel chooses.
    """

    temperature: Tensor  # [B] fp32, 0 where greedy
    top_p: Tensor  # [B] fp32, infinite where off
    top_k: Tensor  # [B] int64, V where off
    min_p: Tensor  # [B] fp32, 0 where off
    filtered: Tensor  # [B] int32, 1 where a filter is on
    seed: Tensor  # [B] int64
    any_sampled: bool
    used: tuple[str, ...]  # filters that a request uses

    @property
    def any_filter(self) -> bool:
        return bool(self.used)

    @property
    def filters(self) -> dict[str, Tensor]:
        """The tensors of all filters by name."""
        return {name: getattr(self, name) for name in FILTERS}

    @property
    def is_argmax(self) -> bool:
        """Whether the target's choice is the argmax of its logits, for every request and wherever in a tree."""
        return not self.any_sampled and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        return False

    def change_at(self, logits: Tensor, context_len: Tensor, tokens: Tensor) -> Tensor:
        """Drafted logits [B, ...] of `tokens` [B, ...], changed by the tokens committed so far."""
        return logits


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


def reads_any_type(x: Tensor) -> bool:
    """Whether logits on x's device need not be fp32, and sampling costs no more at all nodes than along one path: on
    CUDA, where kernels choose.
    """
    return pick(OP, x) is TRITON


def _picked_choice(logits: Tensor, context_len: Tensor, depth: Tensor, sampling: SamplingTensors) -> Implementation:
    return pick(OP, logits, library=not sampling.any_sampled)


@op(OP, picked=_picked_choice)
def choose(logits: Tensor, context_len: Tensor, depth: Tensor, sampling: SamplingTensors) -> Tensor:
    """The target's token [B, N] after each node: logits [B, N, V], depth [B, N]; context_len [B], the root's position.

    `NOT_FINITE` where the best score is not finite. Parameters that change the logits are the caller's to apply.
    """
    logits = logits.float()
    if not sampling.any_sampled:
        return best_token(logits)
    noise = gumbel(sampling.seed, context_len[:, None] + 1 + depth, logits.shape[-1])
    return best_token(sampled_scores(logits, sampling, noise))


def pool_size_of(logits: Tensor, sampling: SamplingTensors, width: int) -> int:
    """Likeliest tokens of a slot that `candidates` looks at."""
    return min(width if sampling.is_argmax else CANDIDATE_POOL, logits.shape[-1])


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` largest of logits [..., V] fp32, largest first, their places, [..., count] each, and the logarithm of
    the sum of e^logit [..., 1]. Of a row with NaN, infinity or nothing finite no probability made of them is a number.
    """
    pool, index = logits.topk(count, dim=-1)
    return pool, index, logits.logsumexp(-1, keepdim=True)


def _picked(logits: Tensor, context_len: Tensor, sampling: SamplingTensors, *_: object, **__: object) -> Implementation:
    picked = pick(OP, logits, library=True)
    kernel = picked is TRITON
    return REFERENCE if kernel and sampling.changes_logits else picked


@op(OP, picked=_picked)
def candidates(
    logits: Tensor,
    context_len: Tensor,
    sampling: SamplingTensors,
    width: int,
    ids: Tensor | None = None,
    branches: Branches | None = None,
) -> Draft:
    """The `width` likeliest tokens of every slot: logits [B, K, S, V or Vd] -> [B, K, S, M].

    When the target samples, it takes argmax(logits / T + g) with noise g that depends on seed, position and token
    alone. Drafts are ranked by scores with the same g ("drafter-invariant" coupling, Daliri et al., arXiv 2408.07978):
    the output does not change, and more drafts are accepted. Penalties, filters and noise are applied to the
    CANDIDATE_POOL likeliest tokens only. Probabilities are normalised over the draft vocabulary.

    With `branches`, [B, K] of them, the token that each presumes rejected is left out of its slot (`mask_rejected`,
    which may happen in place).
    """
    if branches is not None:
        logits = mask_rejected(branches, logits, ids)
    found = likeliest(logits.float(), pool_size_of(logits, sampling, width))
    return ranked(*found, context_len, sampling, width, ids)


def ranked(
    pool: Tensor,
    index: Tensor,
    total: Tensor,
    context_len: Tensor,
    sampling: SamplingTensors,
    width: int,
    ids: Tensor | None = None,
) -> Draft:
    """`candidates` of what `likeliest` found."""
    tokens = index if ids is None else ids[index]
    if sampling.changes_logits:
        changed = sampling.change_at(pool, context_len, tokens)
        others = total + torch.log1p(-(pool - total).exp().sum(-1, keepdim=True).clamp(max=1))
        new_total = torch.logaddexp(others, changed.logsumexp(-1, keepdim=True))
        total = new_total.where((changed != pool).any(-1, keepdim=True), total)
        pool, order = changed.sort(dim=-1, descending=True, stable=True)
        tokens = tokens.gather(-1, order)
    scores = pool
    if sampling.any_sampled:
        slots = torch.arange(pool.shape[2], device=pool.device)
        position = (context_len[:, None, None, None] + 1 + slots[:, None]).expand_as(tokens)
        scores = sampled_scores(pool, sampling, gumbel_at(sampling.seed, position, tokens))
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        tokens = tokens.gather(-1, order)
        random = (sampling.temperature > 0)[:, None, None, None]
        total = torch.where(random, scores.logsumexp(-1, keepdim=True), total)
    # overflow in a drafter must only lower its acceptance: NaN becomes "no proposal"
    logprob = (scores - total)[..., :width].nan_to_num(-math.inf, neginf=-math.inf)
    return Draft(tokens[..., :width], logprob)


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
    if "min_p" in sampling.used:
        min_p = sampling.min_p.view(shape)
        # where it is off, NaN is kept too; and added to a best logit that has overflowed, log(0) would be NaN
        kept = (scaled_logits >= best + min_p.log()) | (min_p <= 0)
    if "top_k" in sampling.used:
        kept = kept & (key >= _threshold(key, kept.long(), sampling.top_k.view(shape)))
    if "top_p" in sampling.used:
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
        above, smallest = larger.gather(-1, chosen), first + chosen.int()
        first = smallest << 8
    return smallest
