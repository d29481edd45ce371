"""The likeliest tokens of every slot of a draft, in two launches. The specification:
`d2sd.plugins.choice.candidates`.

    segments_kernel    reads the logits once: the largest of every SEG neighbours, and the sum of exponentials
    pool_kernel        the POOL best segments hold the POOL best tokens: both are searched for, then the tokens ranked

Of equal logits the smaller token comes first.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

from d2sd.plugins.choice.triton.search import LOG2_E, LOWEST, exp, largest_key, mass_limit, mass_of, segments_of
from d2sd.plugins.choice.triton.tokens import gumbel_of_tokens, scale_of
from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels
from d2sd.plugins.shared.kernels import ABSENT, ascending_of, pack_entry, pack_order, place_of, score_of


@triton.jit
def without_rejected(x, token, row, vocab, rejected, prefix_len, ids, SLOTS: tl.constexpr):
    """Logits x of places `token` in row `row`, without its branch's rejected token in the slot behind its prefix."""
    branch = row // SLOTS
    if row - branch * SLOTS == tl.minimum(tl.load(prefix_len + branch), SLOTS - 1):
        known = token
        if ids is not None:
            known = tl.load(ids + token, mask=token < vocab, other=-1)
        x = tl.where((token < vocab) & (known == tl.load(rejected + branch)), float("-inf"), x)
    return x


@dependent_kernel
def segments_kernel(
    logits, rejected, prefix_len, ids, maxima, partial, vocab,
    SLOTS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SEG: tl.constexpr,
):  # fmt: skip
    """Grid (R, BLOCKS). logits [R, V]; maxima [R, BLOCKS·BLOCK/SEG] int32; partial [R, 2, BLOCKS] fp32: a block's
    maximum and its sum of exponentials. rejected, prefix_len [R / SLOTS], or None; ids [V] or None.
    """
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    segment = tl.arange(0, BLOCK // SEG)
    token = block * BLOCK + segment[:, None] * SEG + tl.arange(0, SEG)[None, :]
    x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    if rejected is not None:
        x = without_rejected(x, token, row, vocab, rejected, prefix_len, ids, SLOTS)
    order, base, total = segments_of(x, LOG2_E)
    tl.store(maxima + (row * BLOCKS + block) * (BLOCK // SEG) + segment, order)
    best = tl.max(tl.max(x, axis=1), axis=0)
    of_base = tl.where(tl.abs(best) == float("inf"), 0.0, best)
    tl.store(partial + row * 2 * BLOCKS + block, best)
    tl.store(partial + row * 2 * BLOCKS + BLOCKS + block, tl.sum(total * exp(base - of_base), axis=0))


@triton.jit
def _log_sum(best, total):
    """Logarithm of a sum, from partial maxima and sums relative to them."""
    largest_one = tl.max(best, axis=0)
    base = tl.where(tl.abs(largest_one) == float("inf"), 0.0, largest_one)
    part_base = tl.where(tl.abs(best) == float("inf"), 0.0, best)
    return base + tl.log(tl.sum(total * exp(part_base - base), axis=0))


@triton.jit
def _place_among_largest(order, inside, count, low, COUNT: tl.constexpr, SHIFT: tl.constexpr):
    """Places of the COUNT largest of `count` orders, the first of equal ones, in the order given; COUNT for the others.
    And the key of the smallest.

    `low`: a key that as many reach. There are less than 2^16 orders.
    """
    keys = tl.where(inside, order >> SHIFT, LOWEST >> SHIFT)
    key = largest_key(keys, tl.minimum(count, COUNT), low, tl.max(keys, axis=0), SHIFT)
    above, equal = inside & (keys > key), inside & (keys == key)
    both = (above.to(tl.int32) << 16) + equal.to(tl.int32)
    room = COUNT - (tl.sum(both, axis=0) >> 16)
    until = tl.cumsum(both, axis=0)
    equals = until & 0xFFFF
    return tl.where(above | (equal & (equals <= room)), (until >> 16) + tl.minimum(equals, room) - 1, COUNT), key


@triton.jit
def _sorted(entries, scratch, SIZE: tl.constexpr):
    """Different entries, largest first; ABSENT ones stay behind them. Each goes where as many are larger."""
    place = tl.arange(0, SIZE)
    larger = (entries[None, :] > entries[:, None]).to(tl.int32)
    tl.store(scratch + tl.sum(larger, axis=1), entries, mask=entries != ABSENT)
    tl.debug_barrier()  # what other threads have stored
    count = tl.sum((entries != ABSENT).to(tl.int32), axis=0)
    found = tl.load(scratch + place, mask=place < count, other=ABSENT)
    tl.debug_barrier()  # all have read before it is written again
    return found


@triton.jit
def kept_of_pool(scaled, inside, request, vocab, min_p, top_k, top_p):
    """Mask of the scaled logits of one row, a pool of `vocab` tokens, that the filters of `request` keep."""
    key = ascending_of(scaled)
    larger = key[None, :] > key[:, None]
    best = tl.max(scaled, axis=0)
    kept = inside
    share = tl.load(min_p + request)
    if share > 0:
        kept = kept & (scaled >= best + tl.log(share))
    most = tl.load(top_k + request)
    if most < vocab:
        above = tl.sum((larger & kept[None, :]).to(tl.int32), axis=1)
        kept = kept & (above < most)
    share = tl.load(top_p + request)
    if share < 1:
        mass = tl.where(kept, mass_of(scaled, best), 0)
        above = tl.sum(tl.where(larger, mass[None, :], 0), axis=1)
        kept = kept & (above < mass_limit(tl.sum(mass, axis=0), share))
    return kept


@dependent_kernel
def pool_kernel(
    logits, rejected, prefix_len, maxima, partial, ids, context_len, temperature, seed, segments, entries, tokens,
    logprob, vocab, min_p, top_k, top_p,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, POOL: tl.constexpr, POOLP: tl.constexpr, WIDTH: tl.constexpr,
    SEG: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENTSP: tl.constexpr, BLOCKS: tl.constexpr, BLOCKSP: tl.constexpr,
    SHIFT: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Grid (R). ROWS: rows of a request, K·S; ids [V] or None; tokens int64 and logprob fp32, [R, WIDTH].

    segments [R, POOLP] int32 and entries [R, POOLP] int64 are scratch memory.
    """
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SEGMENTSP)
    rank = tl.arange(0, POOLP)
    inside = rank < POOL
    scratch = entries + row * POOLP
    count = (vocab + SEG - 1) // SEG
    order = tl.load(maxima + row * SEGMENTS + n, mask=n < count, other=LOWEST)
    if POOL == 1:
        segment = tl.full([1], 0, tl.int32) + place_of(
            tl.max(tl.where(n < count, pack_order(order, n), ABSENT), axis=0)
        )
        low = tl.full([], LOWEST, tl.int32) >> SHIFT
    else:
        low = tl.min(tl.where(n < count, order, 0x7FFFFFFF), axis=0) >> SHIFT
        place, low = _place_among_largest(order, n < count, count, low, POOL, SHIFT)
        tl.store(segments + row * POOLP + place, n, mask=place < POOL)
        tl.debug_barrier()  # what other threads have stored
        segment = tl.load(segments + row * POOLP + rank, mask=rank < tl.minimum(count, POOL), other=count)
        # POOL segments reach their smallest key, or all tokens are looked at
        low = tl.where(count >= POOL, low, LOWEST >> SHIFT)
    token = segment[:, None] * SEG + tl.arange(0, SEG)[None, :]
    x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    if rejected is not None:
        x = without_rejected(x, token, row, vocab, rejected, prefix_len, ids, SLOTS)
    x, token = tl.reshape(x, [POOLP * SEG]), tl.reshape(token, [POOLP * SEG])
    order = ascending_of(x)
    if POOL == 1:
        best = tl.max(tl.where(token < vocab, pack_order(order, token), ABSENT), axis=0)
        pool = tl.full([1], 0, tl.int64) + best
    else:
        place, low = _place_among_largest(order, token < vocab, vocab, low, POOL, SHIFT)
        tl.store(scratch + place, pack_order(order, token), mask=place < POOL)
        tl.debug_barrier()
        pool = tl.load(scratch + rank, mask=inside, other=ABSENT)
        tl.debug_barrier()  # all have read before it is written again
        pool = _sorted(pool, scratch, POOLP)
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
            scaled = scale_of(scores, heat)
            kept = kept_of_pool(scaled, inside, request, vocab, min_p, top_k, top_p)
            scaled = tl.where(kept, scaled, float("-inf"))
            position = tl.load(context_len + request) + 1 + row % SLOTS
            scores = scaled + gumbel_of_tokens(tl.load(seed + request), position, token.to(tl.int32))
            sorted_pool = _sorted(tl.where(inside, pack_entry(scores, rank), ABSENT), scratch, POOLP)
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
