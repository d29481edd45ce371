"""Triton functions that kernels of several ops call: sorted lists of scores, and FP8.

Each entry of a list is one integer, and no two are equal:

    63          32 31                    0
    score's order  | 2^31 - 1 - its place     so of equal scores the smaller place comes first, as in a stable sort

Triton's own sort is a bitonic network too, but its exchanges are sums of xor, which its interpreter runs element by
element; here they are plain sums, which wrap around and so are exact.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

#: Less than any entry.
ABSENT = tl.constexpr(-(1 << 63))


@triton.constexpr_function
def _dims(size):
    return size.bit_length() - 1


@triton.jit
def ascending_of(score):
    """int32 in the order of fp32 scores; NaN is the largest, -0.0 equals 0.0."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(score != score, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def value_of(ascending):
    """The fp32 score of an int32 from `ascending_of`."""
    return (ascending ^ ((ascending >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack_order(ascending, place):
    """Entries of int32 in the order of scores, at int32 places."""
    return (ascending.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def pack_entry(score, place):
    """Entries of fp32 scores at int32 places; NaN comes first."""
    return pack_order(ascending_of(score), place)


@triton.jit
def score_of(entry):
    return value_of((entry >> 32).to(tl.int32))


@triton.jit
def place_of(entry):
    return 0x7FFFFFFF - (entry & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _upper(DIMS: tl.constexpr, DIM: tl.constexpr):
    """1 in the upper half of a dimension, counted from the innermost."""
    return tl.reshape(tl.arange(0, 2), [1] * (DIMS - DIM - 1) + [2] + [1] * DIM)


@triton.jit
def _merge(cube, STAGES: tl.constexpr, ALTERNATE: tl.constexpr):
    """Sort bitonic runs of 2^STAGES, downwards; with ALTERNATE each other one upwards."""
    dims: tl.constexpr = _dims(cube.numel)
    for step in tl.static_range(STAGES):
        other = tl.sum(cube, dims - STAGES + step, keep_dims=True) - cube
        larger_first = _upper(dims, STAGES - 1 - step) == 0
        if ALTERNATE:
            larger_first = larger_first ^ (_upper(dims, STAGES) == 1)
        cube = tl.where((cube > other) == larger_first, cube, other)
    return cube


@triton.jit
def largest(entries, COUNT: tl.constexpr):
    """The COUNT largest of a list, largest first; both sizes are powers of two."""
    log_size: tl.constexpr = _dims(entries.numel)
    log_count: tl.constexpr = _dims(COUNT)
    cube = tl.reshape(entries, [2] * log_size if log_size else [1])
    for stage in tl.static_range(1, log_count + 1):
        cube = _merge(cube, stage, stage < log_size)
    for stage in tl.static_range(log_count + 1, log_size + 1):
        cube = tl.max(cube, axis=log_size - stage, keep_dims=True)
        cube = tl.reshape(cube, [2] * (log_size - stage + log_count) if stage < log_size + log_count else [1])
        cube = _merge(cube, log_count, stage < log_size)
    return tl.reshape(cube, [COUNT])


@triton.jit
def merged(one, other):
    """The larger half of two sorted lists of one size, sorted."""
    dims: tl.constexpr = _dims(one.numel)
    shape: tl.constexpr = [2] * dims if dims else [1]
    cube = tl.reshape(other, shape)
    for dim in tl.static_range(dims):
        cube = tl.sum(cube, dim, keep_dims=True) - cube  # reversed, dimension by dimension
    cube = tl.maximum(tl.reshape(one, shape), cube)
    return tl.reshape(_merge(cube, dims, False), [one.numel])


@triton.jit
def in_fp8_range(x, scale):
    """x / scale within E4M3's range. IEEE division, or a tie would round to the other side than in the reference."""
    return tl.clamp(tl.div_rn(x.to(tl.float32), scale), -448.0, 448.0)
