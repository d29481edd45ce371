"""Searches that end after as many turns as a key has bits: each halves an interval of keys, whatever the numbers are.

A key is the upper part of a score's order (`ascending_of`), `SHIFT` bits less: logits of 16 bits have no others.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from d2sd.plugins.shared.kernels import ascending_of, value_of

LOG2_E = tl.constexpr(1.4426950408889634)
#: Less than any order.
LOWEST = tl.constexpr(-(1 << 31))
#: The order of -inf.
OF_NOTHING = tl.constexpr(-0x7F800001)


@triton.jit
def _precise(x):
    return libdevice.exp(x)


@triton.jit
def _interpreted(x):
    return tl.exp(x)


#: The exponential of CUDA's and PyTorch's fp32; `tl.exp` has fewer digits. The interpreter has one only.
exp = _interpreted if triton.knobs.runtime.interpret else _precise


@triton.jit
def value_of_key(key, SHIFT: tl.constexpr):
    """The number of 32 - SHIFT bits that has this key."""
    order = key << SHIFT
    return value_of(tl.where(order < 0, order | ((1 << SHIFT) - 1), order))


@triton.jit
def largest_key(keys, count, low, high, SHIFT: tl.constexpr):
    """The largest int32 key from `low` to `high` that `count` of the keys reach; `low` where they are fewer."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    for _ in range(32 - SHIFT):
        if low < high:
            middle = high - ((high - low) >> 1)
            reached = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0) >= count
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def smallest_key(keys, mass, limit, low, high, SHIFT: tl.constexpr):
    """The smallest int32 key from `low` to `high` above which the mass is less than `limit`."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    for _ in range(32 - SHIFT):
        if low < high:
            middle = low + ((high - low) >> 1)
            is_less = tl.sum(tl.where(keys > middle.to(tl.int32), mass, 0), axis=0) < limit
            low = tl.where(is_less, low, middle + 1)
            high = tl.where(is_less, middle, high)
    return low.to(tl.int32)


@triton.jit
def segments_of(x, factor):
    """For each row of x: the order of its maximum, that maximum as a base (0 where it is infinite), and the sum of
    exp2((x - base) * factor).
    """
    best = tl.max(x, axis=1)
    base = tl.where(tl.abs(best) == float("inf"), 0.0, best)
    total = tl.sum(tl.exp2((x - base[:, None]) * factor), axis=1)
    # a maximum may leave NaN out, a sum does not
    return tl.where(total != total, 0x7FFFFFFF, ascending_of(best)), base, total


@triton.jit
def mass_of(scaled, best):
    """Integer mass of a probability; 2^40 + 1 for the likeliest token, also where it is infinite."""
    return (exp(tl.where(scaled == best, 0.0, scaled - best)) * 1099511627776.0).to(tl.int64) + 1


@triton.jit
def mass_limit(total, share):
    """The mass that keeps `share` of the total: int64, 1 or more; past the total where top-p is off."""
    limit = tl.ceil(total.to(tl.float64) * tl.where(share < 1, share, 0.0).to(tl.float64)).to(tl.int64)
    return tl.where(share < 1, tl.where(limit < 1, 1, limit), total + 1)
