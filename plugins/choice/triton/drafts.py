"""The likeliest tokens of every slot of a draft, in two launches. The specification:
`d2sd.plugins.choice.candidates`.

    segments_kernel    reads the logits once: the largest of every SEG neighbours, and the sum of exponentials
    pool_kernel        the POOL best segments hold the POOL best tokens: both are sorted in registers, then ranked

Of equal logits the smaller token comes first.

Filters are here too, as thresholds of logits: of a whole row in a launch of its own, of a pool in registers.

    threshold_kernel   the smallest logit of a row that the filters keep, for the target's choice
    kept_of_pool       which tokens of a sorted pool they keep
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from d2sd.plugins.choice.triton.tokens import gumbel_of_tokens
from d2sd.plugins.shared.kernels import ABSENT, ascending_of, largest, pack_entry, pack_order, place_of, score_of


@triton.jit
def _precise(x):
    return libdevice.exp(x)


@triton.jit
def _interpreted(x):
    return tl.exp(x)


#: The exponential of CUDA's and PyTorch's fp32; `tl.exp` has fewer digits. The interpreter has one only.
exp = _interpreted if triton.knobs.runtime.interpret else _precise


@triton.jit
def kept_of_pool(
    scaled,
    inside,
    request,
    min_p,
    top_k,
    top_p,
    SIZE: tl.constexpr,
    MIN_P: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
):
    """Which of the SIZE scaled logits of one row the filters of `request` keep."""
    key = ascending_of(scaled)
    larger = key[None, :] > key[:, None]
    best = tl.max(scaled, axis=0)
    kept = inside
    if MIN_P:
        share = tl.load(min_p + request)
        kept = kept & (scaled >= tl.where(share > 0, best + tl.log(share), float("-inf")))
    if TOP_K:
        above = tl.sum((larger & kept[None, :]).to(tl.int64), axis=1)
        kept = kept & (above < tl.load(top_k + request))
    if TOP_P:
        mass = tl.where(kept, mass_of(scaled, best), 0)
        above = tl.sum(tl.where(larger, mass[None, :], 0), axis=1)
        kept = kept & (above < mass_limit(tl.sum(mass, axis=0), tl.load(top_p + request)))
    return kept


@triton.jit
def mass_of(scaled, best):
    """Integer mass of a probability; 2^40 + 1 for the likeliest token, also where it is infinite."""
    return (exp(tl.where(scaled == best, 0.0, scaled - best)) * 1099511627776.0).to(tl.int64) + 1


@triton.jit
def _scaled(row, token, vocab, heat):
    x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, heat + tl.zeros_like(x))


@triton.jit
def _smallest_kept(row, vocab, heat, best, low, high, limit, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest order from `low` to `high` of which the larger ones weigh less than `limit`.

    All that weighs is `low` at least. Weights are masses, or 1.
    """
    while low < high:
        middle = (low + high) >> 1
        weight = tl.zeros([BLOCK], tl.int64)
        below = tl.full([BLOCK], -(1 << 31), tl.int64)
        above = tl.full([BLOCK], 1 << 31, tl.int64)
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            scaled = _scaled(row, token, vocab, heat)
            order = ascending_of(scaled).to(tl.int64)
            is_above = (token < vocab) & (order > middle)
            weight += tl.where(is_above, mass_of(scaled, best) if MASS else 1, 0)
            above = tl.where(is_above, tl.minimum(above, order), above)
            below = tl.where((token < vocab) & (order <= middle), tl.maximum(below, order), below)
        if tl.sum(weight, axis=0) < limit:
            high = tl.maximum(low, tl.max(below, axis=0))
        else:
            low = tl.min(above, axis=0)
    return high


@triton.jit
def threshold_kernel(
    logits, temperature, min_p, top_k, top_p, threshold, vocab,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, MIN_P: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """Grid (R). threshold [R] int32: the order of the smallest scaled logit that the row's filters keep."""
    number = tl.program_id(0).to(tl.int64)
    request = number // ROWS
    row = logits + number * vocab
    heat = tl.load(temperature + request)
    if heat > 0:
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            best = tl.maximum(best, _scaled(row, start + tl.arange(0, BLOCK), vocab, heat))
        best = tl.max(best, axis=0)
        high = ascending_of(best).to(tl.int64)
        low = tl.full([], -(1 << 31), tl.int64)
        if MIN_P:
            share = tl.load(min_p + request)
            least = ascending_of(best + tl.log(share)).to(tl.int64)
            low = tl.where(share > 0, tl.maximum(low, least), low)
        if TOP_K:
            most = tl.load(top_k + request)
            if most < vocab:
                low = _smallest_kept(row, vocab, heat, best, low, high, most, False, BLOCK)
        if TOP_P:
            share = tl.load(top_p + request)
            if share < 1:
                mass = tl.zeros([BLOCK], tl.int64)
                for start in range(0, vocab, BLOCK):
                    token = start + tl.arange(0, BLOCK)
                    scaled = _scaled(row, token, vocab, heat)
                    kept = (token < vocab) & (ascending_of(scaled).to(tl.int64) >= low)
                    mass += tl.where(kept, mass_of(scaled, best), 0)
                limit = mass_limit(tl.sum(mass, axis=0), share)
                low = _smallest_kept(row, vocab, heat, best, low, high, limit, True, BLOCK)
        tl.store(threshold + number, low.to(tl.int32))


@triton.jit
def mass_limit(total, share):
    """The mass that keeps `share` of the total: int64, 1 or more; past the total where top-p is off."""
    limit = tl.ceil(total.to(tl.float64) * tl.where(share < 1, share, 0.0).to(tl.float64)).to(tl.int64)
    return tl.where(share < 1, tl.where(limit < 1, 1, limit), total + 1)


@triton.jit
def segments_kernel(logits, maxima, partial, vocab, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SEG: tl.constexpr):
    """Grid (R, BLOCKS). logits [R, V]; maxima [R, BLOCKS·BLOCK/SEG] int32; partial [R, 2, BLOCKS] fp32: a block's
    maximum and its sum of exponentials.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    segment = tl.arange(0, BLOCK // SEG)
    token = block * BLOCK + segment[:, None] * SEG + tl.arange(0, SEG)[None, :]
    x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    of_segment = tl.max(ascending_of(x), axis=1)
    tl.store(maxima + (row * BLOCKS + block) * (BLOCK // SEG) + segment, of_segment)
    best = tl.max(tl.max(x, axis=1), axis=0)
    base = tl.where(tl.abs(best) == float("inf"), 0.0, best)
    total = tl.sum(tl.sum(exp(x - base), axis=1), axis=0)
    tl.store(partial + row * 2 * BLOCKS + block, best)
    tl.store(partial + row * 2 * BLOCKS + BLOCKS + block, total)


@triton.jit
def _log_sum(best, total):
    """Logarithm of a sum, from partial maxima and sums relative to them."""
    largest_one = tl.max(best, axis=0)
    base = tl.where(tl.abs(largest_one) == float("inf"), 0.0, largest_one)
    part_base = tl.where(tl.abs(best) == float("inf"), 0.0, best)
    return base + tl.log(tl.sum(total * exp(part_base - base), axis=0))


@triton.jit
def pool_kernel(
    logits, maxima, partial, ids, context_len, temperature, seed, min_p, top_k, top_p, tokens, logprob, vocab,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, POOL: tl.constexpr, POOLP: tl.constexpr, WIDTH: tl.constexpr,
    SEG: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENTSP: tl.constexpr, BLOCKS: tl.constexpr, BLOCKSP: tl.constexpr,
    SAMPLED: tl.constexpr, MIN_P: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """Grid (R). ROWS: rows of a request, K·S; ids [V] or None; tokens int64 and logprob fp32, [R, WIDTH]."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SEGMENTSP)
    order = tl.load(maxima + row * SEGMENTS + n, mask=n < SEGMENTS, other=0)
    entries = tl.where(n < SEGMENTS, pack_order(order, n), ABSENT)
    chosen = largest(entries, POOLP)
    segment = tl.where(chosen == ABSENT, SEGMENTS, place_of(chosen))
    token = segment[:, None] * SEG + tl.arange(0, SEG)[None, :]
    x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    entries = tl.where(token < vocab, pack_entry(x, token), ABSENT)
    pool = largest(tl.reshape(entries, [POOLP * SEG]), POOLP)
    rank = tl.arange(0, POOLP)
    inside = rank < POOL
    token = tl.where(inside, place_of(pool), 0)
    scores = tl.where(inside, score_of(pool), float("-inf"))
    if ids is not None:
        token = tl.load(ids + token)
    token = token.to(tl.int64)

    b = tl.arange(0, BLOCKSP)
    best = tl.load(partial + row * 2 * BLOCKS + b, mask=b < BLOCKS, other=float("-inf"))
    sums = tl.load(partial + row * 2 * BLOCKS + BLOCKS + b, mask=b < BLOCKS, other=0.0)
    total = _log_sum(best, sums)
    if SAMPLED:
        request = row // ROWS
        heat = tl.load(temperature + request)
        if heat > 0:
            scaled = tl.div_rn(scores, heat + tl.zeros([POOLP], tl.float32))
            kept = inside
            if MIN_P or TOP_K or TOP_P:
                kept = kept_of_pool(scaled, inside, request, min_p, top_k, top_p, POOLP, MIN_P, TOP_K, TOP_P)
            scaled = tl.where(kept, scaled, float("-inf"))
            position = tl.load(context_len + request) + 1 + row % SLOTS
            scores = scaled + gumbel_of_tokens(tl.load(seed + request), position, token.to(tl.int32))
            sorted_pool = largest(tl.where(inside, pack_entry(scores, rank), ABSENT), POOLP)
            token = tl.gather(token, tl.where(inside, place_of(sorted_pool), 0), 0)
            scores = tl.where(inside, score_of(sorted_pool), float("-inf"))
            top = tl.max(scores, axis=0)
            top = tl.where(tl.abs(top) == float("inf"), 0.0, top)
            total = top + tl.log(tl.sum(exp(scores - top), axis=0))
    log_q = scores - total
    # NaN, of an overflow, proposes nothing; +inf becomes the largest number, as in `nan_to_num`
    log_q = tl.where(log_q != log_q, float("-inf"), tl.where(log_q == float("inf"), 3.4028234663852886e38, log_q))
    tl.store(tokens + row * WIDTH + rank, token, mask=rank < WIDTH)
    tl.store(logprob + row * WIDTH + rank, log_q, mask=rank < WIDTH)
