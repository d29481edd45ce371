"""min-p, top-k and top-p without a sort. The specification: `d2sd.plugins.choice.reference`.

Of a pool in registers each logit is compared with each. Of a whole row the smallest logit kept is found by bisection of
its order, an int32: a turn reads the row, and both ends move on to logits that are there. Weights are the integers of
the specification, so the kept set is the same, ties included.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from d2sd.plugins.shared.order import ascending_of


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
    scaled, inside, request, min_p, top_k, top_p, SIZE: tl.constexpr,
    MIN_P: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
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
