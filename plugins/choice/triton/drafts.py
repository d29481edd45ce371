"""The likeliest tokens of every slot of a draft, in two launches. The specification:
`d2sd.plugins.choice.candidates`.

    segments_kernel    reads the logits once: the largest of every SEG neighbours, and the sum of exponentials
    pool_kernel        the POOL best segments hold the POOL best tokens: both are sorted in registers, then ranked

Of equal logits the smaller token comes first.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

from d2sd.plugins.choice.triton.filters import exp, kept_of_pool
from d2sd.plugins.choice.triton.noise import gumbel_of_tokens
from d2sd.plugins.shared.order import ABSENT, ascending_of, largest, pack_entry, pack_order, place_of, score_of


@triton.jit
def segments_kernel(
    logits, maxima, partial, vocab,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SEG: tl.constexpr,
):  # fmt: skip
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
    own = tl.where(tl.abs(best) == float("inf"), 0.0, best)
    return base + tl.log(tl.sum(total * exp(own - base), axis=0))


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
                kept = kept_of_pool(
                    scaled, inside, request, min_p, top_k, top_p, POOLP, MIN_P, TOP_K, TOP_P,
                )  # fmt: skip
            scaled = tl.where(kept, scaled, float("-inf"))
            position = tl.load(context_len + request) + 1 + row % SLOTS
            scores = scaled + gumbel_of_tokens(tl.load(seed + request), position, token.to(tl.int32))
            sorted_pool = largest(tl.where(inside, pack_entry(scores, rank), ABSENT), POOLP)
            token = tl.gather(token, tl.where(inside, place_of(sorted_pool), 0), 0)
            scores = tl.where(inside, score_of(sorted_pool), float("-inf"))
            top = tl.max(scores, axis=0)
            top = tl.where(tl.abs(top) == float("inf"), 0.0, top)
            total = top + tl.log(tl.sum(exp(scores - top), axis=0))
    own = scores - total
    # NaN, of an overflow, proposes nothing; +inf becomes the largest number, as in `nan_to_num`
    own = tl.where(own != own, float("-inf"), tl.where(own == float("inf"), 3.4028234663852886e38, own))
    tl.store(tokens + row * WIDTH + rank, token, mask=rank < WIDTH)
    tl.store(logprob + row * WIDTH + rank, own, mask=rank < WIDTH)
