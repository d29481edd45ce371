"""The target's token after every row, and the Gumbel noise it is chosen with, whose integers are the specification's,
bit for bit: `d2sd.plugins.choice.choose`.

    scores_kernel     logits in their own type, scaled, plus noise: the best token of each block
    combine_kernel    the best of the blocks; where a request of the batch filters, filters.py has another in its place

Of equal scores the smaller token is chosen; NaN is the largest of all. A best score that is NaN or infinite stands for
no token: `d2sd.token_codes.NOT_FINITE`.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

from d2sd.plugins.choice.triton.search import LOG2_E, segments_of
from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels
from d2sd.plugins.shared.kernels import ABSENT, pack_entry, place_of, score_of

#: `d2sd.token_codes.NOT_FINITE`
NO_TOKEN = tl.constexpr(-1)


@triton.jit
def philox_words(seed, position, quad):
    """The words of four tokens each: seed and position are scalars or shaped as `quad`, the tokens' number // 4."""
    c0 = quad.to(tl.uint32)
    c1 = (c0 * 0).to(tl.uint32) + position.to(tl.uint32)
    c2, c3 = c1 * 0, c1 * 0
    k0 = c2 + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = c2 + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        low = c0.to(tl.uint64) * 0xD2511F53
        high = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (high >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = (high & 0xFFFFFFFF).to(tl.uint32)
        c2 = (low >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = (low & 0xFFFFFFFF).to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _gumbel(bits):
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -tl.log(-tl.log(uniform))


@triton.jit
def gumbel_of_run(seed, position, first, SIZE: tl.constexpr):
    """Noise of the tokens first .. first + SIZE; both are multiples of 4."""
    quad = first // 4 + tl.arange(0, SIZE // 4)
    w0, w1, w2, w3 = philox_words(seed, position, quad)
    return _gumbel(tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [SIZE]))


@triton.jit
def gumbel_of_tokens(seed, position, token):
    """Noise of single tokens."""
    w0, w1, w2, w3 = philox_words(seed, position, token // 4)
    word = token % 4
    return _gumbel(tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3))))


@triton.jit
def scale_of(logits, heat):
    """Logits / T, rounded as by IEEE 754."""
    return tl.div_rn(logits, heat + tl.zeros_like(logits))


@dependent_kernel
def scores_kernel(
    logits, temperature, seed, context_len, depth, filtered, partial, maxima, sums, vocab,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SEG: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Grid (R, BLOCKS). logits [R, V], of ROWS rows a request; depth [R]; partial [R, BLOCKS] int64.

    Where a request of the batch filters, its rows take other results: of every SEG tokens the order of the maximum,
    maxima [R, BLOCKS·BLOCK/SEG] int32, and the sum of exponentials of logits / T relative to it, `sums` fp32. Else both
    are None.
    """
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    filters = False
    if SAMPLED:
        request = row // ROWS
        heat = tl.load(temperature + request)
        random = heat > 0
        if maxima is not None:
            filters = tl.load(filtered + request) != 0
            if filters:
                order, _base, total = segments_of(tl.reshape(score, [BLOCK // SEG, SEG]), LOG2_E / heat)
                at = (row * BLOCKS + block) * (BLOCK // SEG) + tl.arange(0, BLOCK // SEG)
                tl.store(maxima + at, order)
                tl.store(sums + at, total)
        if random & (filters == 0):
            position = tl.load(context_len + request) + tl.load(depth + row) + 1
            noise = gumbel_of_run(tl.load(seed + request), position, block * BLOCK, BLOCK)
            score = scale_of(score, heat) + noise
    if filters == 0:
        entry = tl.where(token < vocab, pack_entry(score, token), ABSENT)
        tl.store(partial + row * BLOCKS + block, tl.max(entry, axis=0))


@dependent_kernel
def combine_kernel(partial, chosen, BLOCKS: tl.constexpr, BLOCKSP: tl.constexpr):
    """Grid (R). chosen [R] int64, -1 where the best score is not a finite number."""
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKSP)
    best = tl.max(tl.load(partial + row * BLOCKS + b, mask=b < BLOCKS, other=ABSENT), axis=0)
    store_chosen(chosen + row, best)


@triton.jit
def store_chosen(chosen, best):
    """Stores the token of an entry; `NO_TOKEN` where its score is infinite or NaN, and of no entry."""
    finite = (best != ABSENT) & (tl.abs(score_of(best)) < float("inf"))  # false of NaN
    tl.store(chosen, tl.where(finite, place_of(best), NO_TOKEN).to(tl.int64))
