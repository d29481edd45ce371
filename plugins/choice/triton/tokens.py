"""The target's token after every row. The specification: `d2sd.plugins.choice.choose_reference`.

    threshold_kernel  the smallest logit that the filters keep, where a request has any
    scores_kernel     logits in their own type, scaled, plus noise: the best token of each block
    combine_kernel    the best of the blocks

Of equal scores the smaller token is chosen; NaN is the largest of all. A best score that is NaN or infinite stands for
no token: `d2sd.token_codes.NOT_FINITE`.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

from d2sd.plugins.choice.triton.noise import gumbel_of_run
from d2sd.plugins.shared.order import ABSENT, ascending_of, pack_entry, place_of, score_of

_NOT_FINITE = tl.constexpr(-1)


@triton.jit
def scores_kernel(
    logits, temperature, seed, context_len, depth, threshold, partial, vocab,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Grid (R, BLOCKS). logits [R, V], of ROWS rows a request; depth [R]; threshold [R] of `threshold_kernel`,
    None without filters; partial [R, BLOCKS] int64.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    if SAMPLED:
        request = row // ROWS
        heat = tl.load(temperature + request)
        if heat > 0:
            position = tl.load(context_len + request) + tl.load(depth + row) + 1
            noise = gumbel_of_run(tl.load(seed + request), position, block * BLOCK, BLOCK)
            score = tl.div_rn(score, heat + tl.zeros([BLOCK], tl.float32))
            if threshold is not None:
                score = tl.where(ascending_of(score) >= tl.load(threshold + row), score, float("-inf"))
            score = score + noise
    entry = tl.where(token < vocab, pack_entry(score, token), ABSENT)
    tl.store(partial + row * BLOCKS + block, tl.max(entry, axis=0))


@triton.jit
def combine_kernel(partial, chosen, BLOCKS: tl.constexpr, BLOCKSP: tl.constexpr):
    """Grid (R). chosen [R] int64, -1 where the best score is not a finite number."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKSP)
    best = tl.max(tl.load(partial + row * BLOCKS + b, mask=b < BLOCKS, other=ABSENT), axis=0)
    finite = tl.abs(score_of(best)) < float("inf")  # false of NaN
    tl.store(chosen + row, tl.where(finite, place_of(best), _NOT_FINITE).to(tl.int64))
