"""Numbers as registers hold them: bits to values of a PTX type and back, with its roundings.

`decode("bf16", bits)` gives fp32 values, `encode("bf16", values)` rounds them to nearest even. Packed types, such as
f32x2 or bf16x2, have an axis of two more, the lower half first.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

UNSIGNED: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_NATIVE: dict[str, Any] = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
LARGEST_E4M3 = 448.0
_TINIEST = np.float32(2.0**-126)  # the least fp32 that is not subnormal


def width(kind: str) -> int:
    """Bits of a type: 32 of s32, f16x2 or e4m3x4."""
    if kind == "pred":
        return 1
    base, _, count = kind.partition("x")
    bits = 8 if base.startswith("e4m3") else int(base.lstrip("abcdefghijklmnopqrstuvwyz"))
    return bits * int(count or 1)


def decode(kind: str, raw: Array) -> Array:
    """Bits to values. `raw` is unsigned, of the type's width or wider."""
    raw = raw.astype(UNSIGNED[width(kind)], copy=False)
    if kind == "pred" or (kind[0] in "bu" and kind[1].isdigit()):
        return raw
    if "x" in kind:
        base = kind.partition("x")[0]
        each = width(base)
        halves = np.stack([raw & UNSIGNED[width(kind)]((1 << each) - 1), raw >> UNSIGNED[width(kind)](each)], -1)
        return decode(base, halves)
    if kind in _NATIVE:
        found: Array = raw.view(_NATIVE[kind])
        return found.astype(np.float32) if kind == "f16" else found
    if kind == "bf16":
        wide: Array = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    if kind == "e4m3":
        return e4m3_values()[raw]
    signed: Array = raw.view(SIGNED[width(kind)])
    return signed


def encode(kind: str, value: Array) -> Array:
    """Values to bits, rounded to nearest even; too large for E4M3 is its largest number, elsewhere infinity."""
    if kind == "pred":
        return value.astype(np.bool_)
    if "x" in kind:
        base = kind.partition("x")[0]
        bits = UNSIGNED[width(kind)]
        halves = encode(base, value).astype(bits)
        packed: Array = halves[..., 0] | halves[..., 1] << bits(width(base))
        return packed
    if kind in _NATIVE:
        native: Array = np.ascontiguousarray(value, _NATIVE[kind]).view(UNSIGNED[width(kind)])
        return native
    if kind == "bf16":
        return _to_bf16(value)
    if kind == "e4m3":
        return _to_e4m3(value)
    if value.dtype == np.bool_:
        return value.astype(UNSIGNED[width(kind)])
    cut: Array = np.ascontiguousarray(value).astype(SIGNED[width(kind)], copy=False).view(UNSIGNED[width(kind)])
    return cut


def _to_bf16(value: Array) -> Array:
    """Half of the last place is added, with the last place's own bit for ties.

    What fp32 does not hold exactly becomes its neighbour with an odd last bit, which is no tie.
    """
    exact, value = value, np.ascontiguousarray(value, np.float32)
    bits = value.view(np.uint32).astype(np.uint64)
    away, inexact = np.abs(value) > np.abs(exact), (value != exact) & np.isfinite(value)
    bits = np.where(
        inexact & (bits & np.uint64(1) == 0), np.where(away, bits - np.uint64(1), bits + np.uint64(1)), bits
    )
    rounded = (bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    found: Array = np.where(np.isnan(value), np.uint64(0x7FFF), rounded).astype(np.uint16)
    return found


@cache
def e4m3_values() -> Array:
    """All 256: sign, four bits of exponent with bias 7, three of mantissa; no infinity, one NaN a sign."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7) / 8
    size = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    size[[127, 255]] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


def _to_e4m3(value: Array) -> Array:
    sizes = e4m3_values()[:127].astype(np.float64)
    size = np.minimum(np.abs(value.astype(np.float64)), LARGEST_E4M3)
    above = np.searchsorted(sizes, size).clip(0, 126)
    below = (above - 1).clip(0)
    up, down = sizes[above] - size, size - sizes[below]
    code = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    code = np.where(np.isnan(value), 127, code | np.where(np.signbit(value), 128, 0))
    return code.astype(np.uint8)


def flush(value: Array) -> Array:
    """`.ftz`: subnormal numbers are 0, of their sign."""
    return np.where(np.abs(value) < _TINIEST, np.copysign(np.float32(0), value), value)
