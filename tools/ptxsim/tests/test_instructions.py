"""Every instruction of the executor by itself: against Python's integers and NumPy's scalars, one lane at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tools.ptxsim.machine import PREPARE
from tools.ptxsim.parse import Unsupported
from tools.ptxsim.tests.assembly import run
from tools.ptxsim.values import UNSIGNED, Array, decode, encode, width

LANES = 64
PREFIX = {1: "%p", 8: "%rs", 16: "%rs", 32: "%r", 64: "%rd"}
M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def drawn(kind: str, place: int) -> Array:
    """Bits of LANES numbers of a type: its special ones, then random ones."""
    dice = np.random.default_rng([place, width(kind)])
    bits = width(kind)
    if kind == "pred":
        return dice.integers(0, 2, LANES).astype(bool)
    if kind == "count":
        return dice.integers(0, 40, LANES).astype(np.uint32)
    raw = dice.integers(0, 1 << bits, LANES, dtype=np.uint64).astype(UNSIGNED[bits])
    if kind.startswith(("f", "bf")) and "x" not in kind:
        values = dice.normal(size=LANES) * 2.0 ** dice.integers(-8, 8, LANES)
        values[:6] = [0, -0.0, np.inf, -np.inf, np.nan, 2.0**-130]
        return encode(kind, np.roll(values, 7 * place))
    if "x" in kind:
        return encode(kind, dice.normal(size=(LANES, 2)))
    raw[:4] = [0, (1 << bits) - 1, 1 << bits - 1, (1 << bits - 1) - 1]
    return np.roll(raw, 5 * place)


def result(text: str, kinds: list[str], sources: list[Array], to: str) -> Array:
    """Bits of the result of `text`, such as "add.s32", over registers of these types."""
    used = [f"{PREFIX[max(width(kind), 1)]}{place}" for place, kind in enumerate(kinds, 1)]
    target = f"{PREFIX[width(to)]}0"
    opcode, _, more = text.partition(" ")
    operands = ", ".join([target, *used, *([more] if more else [])])
    registers = dict(zip(used, sources, strict=True))
    return run(f"{opcode} {operands};", registers, threads=LANES).registers[target]


def integers(kind: str, raw: Array) -> list[int]:
    return [int(value) for value in decode(kind, raw)]


def trunc_div(a: int, b: int) -> int:
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def field(a: int, start: int, length: int) -> int:
    return a >> min(start, 63) & (1 << length) - 1


def signed_field(a: int, start: int, length: int) -> int:
    found = field(a, start, length)
    return found - (1 << length) if length and found >> length - 1 else found


def byte_of(a: int, b: int, selector: int) -> int:
    byte = (b << 32 | a) >> 8 * (selector & 7) & 255
    return byte if selector < 8 else 255 * (byte >> 7)


INTEGERS: list[tuple[str, str, str, Callable[..., int]]] = [
    *((f"add.{k}", f"{k} {k}", k, lambda a, b: a + b) for k in ("s16", "u32", "s32", "s64", "u64")),
    *((f"sub.{k}", f"{k} {k}", k, lambda a, b: a - b) for k in ("s16", "s32", "s64")),
    *((f"mul.lo.{k}", f"{k} {k}", k, lambda a, b: a * b) for k in ("s16", "u32", "s32", "s64", "u64")),
    *((f"mul.hi.{k}", f"{k} {k}", k, lambda a, b: a * b >> 32) for k in ("u32", "s32")),
    ("mul.wide.s32", "s32 s32", "s64", lambda a, b: a * b),
    ("mul.wide.u32", "u32 u32", "u64", lambda a, b: a * b),
    ("mul.wide.u16", "u16 u16", "u32", lambda a, b: a * b),
    *((f"mad.lo.{k}", f"{k} {k} {k}", k, lambda a, b, c: a * b + c) for k in ("s32", "u32", "s64")),
    ("mad.wide.s32", "s32 s32 s64", "s64", lambda a, b, c: a * b + c),
    ("mad.wide.u32", "u32 u32 u64", "u64", lambda a, b, c: a * b + c),
    *((f"div.{k}", f"{k} {k}", k, trunc_div) for k in ("s32", "u32", "u16")),
    *((f"rem.{k}", f"{k} {k}", k, lambda a, b: 0 if b == 0 else a - b * trunc_div(a, b)) for k in ("s32", "u32")),
    *((f"min.{k}", f"{k} {k}", k, min) for k in ("s32", "u32", "s64")),
    ("min.relu.s32", "s32 s32", "s32", lambda x, y: max(min(x, y), 0)),
    *((f"max.{k}", f"{k} {k}", k, max) for k in ("s32", "u32", "s64")),
    ("neg.s32", "s32", "s32", lambda a: -a),
    ("neg.s64", "s64", "s64", lambda a: -a),
    ("abs.s32", "s32", "s32", abs),
    *((f"and.b{n}", f"b{n} b{n}", f"b{n}", lambda a, b: a & b) for n in (16, 32, 64)),
    *((f"or.b{n}", f"b{n} b{n}", f"b{n}", lambda a, b: a | b) for n in (16, 32, 64)),
    *((f"xor.b{n}", f"b{n} b{n}", f"b{n}", lambda a, b: a ^ b) for n in (16, 32, 64)),
    *((f"not.b{n}", f"b{n}", f"b{n}", lambda a: ~a) for n in (16, 32, 64)),
    *(
        (f"{n}.pred", "pred pred", "pred", f)
        for n, f in (("and", lambda a, b: a & b), ("or", lambda a, b: a | b), ("xor", lambda a, b: a ^ b))
    ),
    ("not.pred", "pred", "pred", lambda a: 1 - a),
    ("shl.b32", "b32 u32", "b32", lambda a, b: a << b if b < 32 else 0),
    ("shl.b64", "b64 u32", "b64", lambda a, b: a << b if b < 64 else 0),
    ("shr.u32", "u32 u32", "u32", lambda a, b: a >> b),
    ("shr.b32", "b32 u32", "b32", lambda a, b: a >> b),
    ("shr.s32", "s32 u32", "s32", lambda a, b: a >> b),
    ("shr.s16", "s16 u32", "s16", lambda a, b: a >> b),
    ("shr.u64", "u64 u32", "u64", lambda a, b: a >> b),
    ("shf.l.wrap.b32", "b32 b32 b32", "b32", lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32),
    ("shf.r.wrap.b32", "b32 b32 b32", "b32", lambda a, b, c: (b << 32 | a) >> (c & 31)),
    ("shf.r.clamp.b32", "b32 b32 b32", "b32", lambda a, b, c: (b << 32 | a) >> min(c, 32)),
    ("bfe.u32 5, 9", "u32", "u32", lambda a: field(a, 5, 9)),
    ("bfe.s32 5, 9", "s32", "s32", lambda a: signed_field(a, 5, 9)),
    ("bfe.u32 28, 20", "u32", "u32", lambda a: field(a, 28, 20)),
    ("bfe.s32 28, 20", "s32", "s32", lambda a: signed_field(a, 28, 20)),
    ("bfe.s32 25, 1", "s32", "s32", lambda a: signed_field(a, 25, 1)),
    ("bfe.u32 3, 0", "u32", "u32", lambda a: 0),
    ("bfi.b32 7, 11", "b32 b32", "b32", lambda a, b: b & ~(0x7FF << 7) | (a & 0x7FF) << 7),
    ("prmt.b32", "b32 b32 b32", "b32", lambda a, b, c: sum(byte_of(a, b, c >> 4 * n & 15) << 8 * n for n in range(4))),
    ("lop3.b32 0x96", "b32 b32 b32", "b32", lambda a, b, c: a ^ b ^ c),
    ("lop3.b32 0xE8", "b32 b32 b32", "b32", lambda a, b, c: a & b | b & c | a & c),
    ("popc.b32", "b32", "b32", int.bit_count),
    ("popc.b64", "b64", "b32", int.bit_count),
    ("mov.b32", "b32", "b32", lambda a: a),
    ("mov.u64", "u64", "u64", lambda a: a),
    ("mov.b16", "b16", "b16", lambda a: a),
    ("mov.pred", "pred", "pred", lambda a: a),
    ("selp.b32", "b32 b32 pred", "b32", lambda a, b, c: a if c else b),
    ("selp.b64", "b64 b64 pred", "b64", lambda a, b, c: a if c else b),
    *(
        (f"setp.{n}.{k}", f"{k} {k}", "pred", f)
        for k in ("s32", "u32", "s64", "u64")
        for n, f in (
            ("eq", lambda a, b: a == b),
            ("ne", lambda a, b: a != b),
            ("lt", lambda a, b: a < b),
            ("le", lambda a, b: a <= b),
            ("gt", lambda a, b: a > b),
            ("ge", lambda a, b: a >= b),
        )
    ),
    ("setp.gt.s16", "s16 s16", "pred", lambda a, b: a > b),
    ("setp.ne.b16", "b16 b16", "pred", lambda a, b: a != b),
    ("setp.lt.and.s32", "s32 s32 pred", "pred", lambda a, b, c: a < b and c),
    ("cvt.s64.s32", "s32", "s64", lambda a: a),
    ("cvt.u64.u32", "u32", "u64", lambda a: a),
    ("cvt.u64.u16", "u16", "u64", lambda a: a),
    ("cvt.u32.u64", "u64", "u32", lambda a: a),
    ("cvt.u16.u32", "u32", "u16", lambda a: a),
    ("cvt.u16.u64", "u64", "u16", lambda a: a),
    ("cvt.u32.u16", "u16", "u32", lambda a: a),
    ("cvt.s32.s16", "s16", "s32", lambda a: a),
    ("cvta.to.global.u64", "u64", "u64", lambda a: a),
    ("mov.u32", "u32", "u32", lambda a: a),
    ("mov.u16", "u16", "u16", lambda a: a),
    ("mov.b64", "b64", "b64", lambda a: a),
    ("selp.b16", "b16 b16 pred", "b16", lambda a, b, c: a if c else b),
    *(
        (f"setp.{n}.b{bits}", f"b{bits} b{bits}", "pred", f)
        for bits in (16, 32, 64)
        for n, f in (("eq", lambda a, b: a == b), ("ne", lambda a, b: a != b))
        if (n, bits) != ("ne", 16)
    ),
    ("shl.b16", "b16 u32", "b16", lambda a, b: a << b if b < 16 else 0),
    ("shr.u16", "u16 u32", "u16", lambda a, b: a >> b),
    ("shr.s64", "s64 u32", "s64", lambda a, b: a >> b),
]


@pytest.mark.parametrize(("text", "kinds", "to", "function"), INTEGERS, ids=[case[0] for case in INTEGERS])
def test_integers(text: str, kinds: str, to: str, function: Callable[..., int]) -> None:
    sources = [drawn(kind, place) for place, kind in enumerate(kinds.split())]
    values = [integers(kind, raw) for kind, raw in zip(kinds.split(), sources, strict=True)]
    if text.startswith("sh") and text[:3] != "shf":  # half of the counts within the width
        sources[1] = np.where(np.arange(LANES) % 2, sources[1], sources[1] % 70).astype(np.uint32)
        values[1] = integers("u32", sources[1])
    lanes = list(range(LANES))
    if text.startswith(("div", "rem")):  # what a division by 0 gives is not defined
        lanes = [
            lane for lane in lanes if values[1][lane] != 0 and (values[0][lane], values[1][lane]) != (-(2**31), -1)
        ]
    found = result(text, kinds.split(), sources, to)
    for lane in lanes:
        expected = int(function(*(value[lane] for value in values))) & (1 << width(to)) - 1
        assert int(found[lane]) == expected, [value[lane] for value in values]


f32 = np.float32


def once(*values: Any) -> Any:
    return f32(values[0])


def ftz(value: Any) -> Any:
    return f32(math.copysign(0, value)) if abs(value) < 2.0**-126 else value


def fused(kind: str, down: bool = False) -> Callable[..., Any]:
    """a · b + c as a fraction, then the nearest number of the type, or the one below."""

    def calculate(a: Any, b: Any, c: Any) -> Any:
        if not np.isfinite([a, b, c]).all():
            return f32(WIDE(a) * WIDE(b) + WIDE(c))
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        if exact == 0:
            return f32(-0.0 if down and (np.signbit(a) != np.signbit(b) or np.signbit(c)) else f32(a) * f32(b) + c)
        bits, least = {"f32": (24, -149), "bf16": (8, -133), "f16": (11, -24)}[kind]
        size = math.floor(math.log2(abs(exact)))
        size += (abs(exact) >= Fraction(2) ** (size + 1)) - (abs(exact) < Fraction(2) ** size)
        unit = Fraction(2) ** max(size + 1 - bits, least)
        return f32(float((math.floor(exact / unit) if down else round(exact / unit)) * unit))

    return calculate


def added(kind: str) -> Callable[..., Any]:
    return lambda a, b: fused(kind)(a, 1, b)


def multiplied(kind: str) -> Callable[..., Any]:
    return lambda a, b: fused(kind)(a, b, math.copysign(0, a * b))


def packed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply it to both halves."""
    return lambda *values: np.stack([function(*(value[half] for value in values)) for half in range(2)])


def to_64_bits(a: Any) -> int:
    """NaN is the least number, unlike in narrower types."""
    return -(2**63) if np.isnan(a) else clipped(a, -(2**63), 2**63 - 1)


def lesser(a: Any, b: Any) -> Any:
    return b if np.isnan(a) else a if np.isnan(b) else min(a, b)


def greater(a: Any, b: Any) -> Any:
    return -lesser(-a, -b)


def clipped(value: Any, low: int, high: int) -> int:
    return 0 if np.isnan(value) else low if value <= low else high if value >= high else int(value)


def towards_zero(value: Any) -> Any:
    near = np.float16(value)
    return np.nextafter(near, np.float16(0)) if abs(f32(near)) > abs(value) else near


WIDE = np.longdouble
FLOATS: list[tuple[str, str, str, Callable[..., Any]]] = [
    ("add.f32", "f32 f32", "f32", lambda a, b: a + b),
    ("add.rn.f32", "f32 f32", "f32", lambda a, b: a + b),
    ("sub.f32", "f32 f32", "f32", lambda a, b: a - b),
    ("mul.f32", "f32 f32", "f32", lambda a, b: a * b),
    ("div.rn.f32", "f32 f32", "f32", lambda a, b: a / b),
    ("div.full.f32", "f32 f32", "f32", lambda a, b: a / b),
    ("fma.rn.f32", "f32 f32 f32", "f32", fused("f32")),
    ("fma.rn.ftz.f32", "f32 f32 f32", "f32", lambda a, b, c: ftz(fused("f32")(ftz(a), ftz(b), ftz(c)))),
    ("max.f32", "f32 f32", "f32", greater),
    ("max.NaN.f32", "f32 f32", "f32", lambda a, b: f32(np.nan) if np.isnan(a + b) and a != -b else greater(a, b)),
    ("max.f32", "f32 f32 f32", "f32", lambda a, b, c: greater(greater(a, b), c)),
    ("min.f32", "f32 f32", "f32", lesser),
    (
        "min.xorsign.abs.f32",
        "f32 f32",
        "f32",
        lambda a, b: f32(math.copysign(lesser(abs(a), abs(b)), -1 if np.signbit(a) != np.signbit(b) else 1)),
    ),
    ("neg.f32", "f32", "f32", lambda a: -a),
    ("abs.f32", "f32", "f32", abs),
    ("ex2.approx.ftz.f32", "f32", "f32", lambda a: ftz(f32(np.exp2(WIDE(ftz(a)))))),
    ("lg2.approx.f32", "f32", "f32", lambda a: f32(np.log2(WIDE(a)))),
    ("rcp.approx.f32", "f32", "f32", lambda a: f32(1) / a),
    ("sqrt.rn.f32", "f32", "f32", np.sqrt),
    ("rsqrt.approx.f32", "f32", "f32", lambda a: f32(WIDE(1) / np.sqrt(WIDE(a)))),
    ("tanh.approx.f32", "f32", "f32", lambda a: f32(np.tanh(WIDE(a)))),
    ("sin.approx.f32", "f32", "f32", lambda a: f32(np.sin(float(a)))),
    ("cos.approx.f32", "f32", "f32", lambda a: f32(np.cos(float(a)))),
    ("add.f16", "f16 f16", "f16", lambda a, b: np.float16(a) + np.float16(b)),
    ("mul.bf16", "bf16 bf16", "bf16", lambda a, b: a * b),
    ("add.f32x2", "f32x2 f32x2", "f32x2", lambda a, b: a + b),
    ("mul.f32x2", "f32x2 f32x2", "f32x2", lambda a, b: a * b),
    ("fma.rn.f32x2", "f32x2 f32x2 f32x2", "f32x2", lambda a, b, c: (a.astype(WIDE) * b + c).astype(f32)),
    ("cvt.rn.bf16x2.f32", "f32 f32", "bf16x2", lambda a, b: np.array([b, a])),
    ("cvt.rn.f16x2.f32", "f32 f32", "f16x2", lambda a, b: np.array([b, a])),
    ("cvt.rn.satfinite.e4m3x2.f32", "f32 f32", "e4m3x2", lambda a, b: np.array([b, a])),
    ("cvt.rn.f16x2.e4m3x2", "e4m3x2", "f16x2", lambda a: a),
    ("cvt.rn.satfinite.e4m3x2.f16x2", "f16x2", "e4m3x2", lambda a: a),
    ("cvt.rn.bf16.f32", "f32", "bf16", once),
    ("cvt.rz.f16.f32", "f32", "f16", lambda a: towards_zero(a)),
    ("cvt.rn.f16.f32", "f32", "f16", once),
    ("cvt.f32.bf16", "bf16", "f32", once),
    ("cvt.f32.f16", "f16", "f32", once),
    ("cvt.rn.f32.s32", "s32", "f32", lambda a: f32(int(a))),
    ("cvt.rn.f32.u32", "u32", "f32", lambda a: f32(int(a))),
    ("cvt.rzi.s32.f32", "f32", "s32", lambda a: clipped(a, -(2**31), 2**31 - 1)),
    ("cvt.rni.s32.f32", "f32", "s32", lambda a: clipped(np.rint(a), -(2**31), 2**31 - 1)),
    ("cvt.rzi.u32.f32", "f32", "u32", lambda a: clipped(a, 0, 2**32 - 1)),
    ("cvt.rmi.f32.f32", "f32", "f32", np.floor),
    ("cvt.rpi.f32.f32", "f32", "f32", np.ceil),
    *(
        (f"setp.{n}.f32", "f32 f32", "pred", f)
        for n, f in (
            ("eq", lambda a, b: a == b),
            ("lt", lambda a, b: a < b),
            ("gt", lambda a, b: a > b),
            ("le", lambda a, b: a <= b),
            ("ne", lambda a, b: a < b or a > b),
            ("neu", lambda a, b: a != b),
            ("equ", lambda a, b: a == b or a != a or b != b),
            ("ltu", lambda a, b: not a >= b),
            ("nan", lambda a, b: np.isnan(a) or np.isnan(b)),
            ("num", lambda a, b: a == a and b == b),
        )
    ),
    ("selp.f32", "f32 f32 pred", "f32", lambda a, b, c: a if c else b),
    ("abs.ftz.f32", "f32", "f32", lambda a: abs(ftz(a))),
    ("mul.rn.f32", "f32 f32", "f32", lambda a, b: a * b),
    ("mul.rn.ftz.f32", "f32 f32", "f32", lambda a, b: ftz(f32(WIDE(ftz(a)) * WIDE(ftz(b))))),
    ("sub.rn.f32", "f32 f32", "f32", lambda a, b: a - b),
    ("ex2.approx.f32", "f32", "f32", lambda a: f32(np.exp2(WIDE(a)))),
    ("rsqrt.approx.ftz.f32", "f32", "f32", lambda a: ftz(f32(WIDE(1) / np.sqrt(WIDE(ftz(a)))))),
    ("fma.rm.ftz.f32", "f32 f32 f32", "f32", lambda a, b, c: ftz(fused("f32", down=True)(ftz(a), ftz(b), ftz(c)))),
    *((f"{n}.rn.{k}", f"{k} {k}", k, f(k)) for k in ("bf16", "f16") for n, f in (("add", added), ("mul", multiplied))),
    *(
        (f"{n}{mode}.{k}x2", f"{k}x2 {k}x2", f"{k}x2", packed(f(k)))
        for k in ("bf16", "f16")
        for mode in ("", ".rn")
        for n, f in (("add", added), ("mul", multiplied))
    ),
    ("mul.f16", "f16 f16", "f16", lambda a, b: np.float16(a) * np.float16(b)),
    *((f"fma.rn.{k}", f"{k} {k} {k}", k, fused(k)) for k in ("bf16", "f16")),
    *((f"fma.rn.{k}x2", f"{k}x2 {k}x2 {k}x2", f"{k}x2", packed(fused(k))) for k in ("bf16", "f16")),
    *((f"add.rn.f32.{k}", f"{k} f32", "f32", lambda a, b: f32(a) + b) for k in ("bf16", "f16")),
    *((f"fma.rn.f32.{k}", f"{k} {k} f32", "f32", fused("f32")) for k in ("bf16", "f16")),
    *((f"sub.rn.f32.{k}", f"{k} f32", "f32", lambda a, b: f32(a) - b) for k in ("bf16", "f16")),
    ("add.rn.f32x2", "f32x2 f32x2", "f32x2", lambda a, b: a + b),
    ("mul.rn.f32x2", "f32x2 f32x2", "f32x2", lambda a, b: a * b),
    *((f"sub.{r}f32x2", "f32x2 f32x2", "f32x2", lambda a, b: a - b) for r in ("", "rn.")),
    ("add.f64", "f64 f64", "f64", lambda a, b: a + b),
    ("selp.f64", "f64 f64 pred", "f64", lambda a, b, c: a if c else b),
    ("mul.f64", "f64 f64", "f64", lambda a, b: a * b),
    ("mul.rn.f64", "f64 f64", "f64", lambda a, b: a * b),
    ("cvt.ftz.sat.f32.f32", "f32", "f32", lambda a: f32(0) if not ftz(a) > 0 else min(a, f32(1))),
    ("cvt.f64.f32", "f32", "f64", np.float64),
    ("cvt.rn.f32.f64", "f64", "f32", once),
    ("cvt.rn.f32.s64", "s64", "f32", lambda a: fused("f32")(int(a), 1, 0)),
    ("cvt.rn.f32.u64", "u64", "f32", lambda a: fused("f32")(int(a), 1, 0)),
    ("cvt.rn.f64.s64", "s64", "f64", lambda a: np.float64(int(a))),
    ("cvt.rni.f32.f32", "f32", "f32", np.rint),
    ("cvt.rni.ftz.s32.f32", "f32", "s32", lambda a: clipped(np.rint(ftz(a)), -(2**31), 2**31 - 1)),
    ("cvt.rpi.f64.f64", "f64", "f64", np.ceil),
    ("cvt.rzi.s64.f32", "f32", "s64", to_64_bits),
    ("cvt.rzi.s64.f64", "f64", "s64", to_64_bits),
    *(
        (f"setp.{n}.{k}", f"{k} {k}", "pred", f)
        for k in ("f32", "bf16", "f16")
        for n, f in (
            ("ge", lambda a, b: a >= b),
            ("geu", lambda a, b: not a < b),
            ("gtu", lambda a, b: not a <= b),
            ("leu", lambda a, b: not a > b),
            ("eq", lambda a, b: a == b),
            ("nan", lambda a, b: np.isnan(a) or np.isnan(b)),
        )
        if (n, k) not in (("eq", "f32"), ("nan", "f32"))
    ),
]


@pytest.mark.parametrize(("text", "kinds", "to", "function"), FLOATS, ids=[f"{c[0]}-{c[1].count(' ')}" for c in FLOATS])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_floats(text: str, kinds: str, to: str, function: Callable[..., Any]) -> None:
    """Bit by bit; NaN are all alike."""
    sources = [drawn(kind, place) for place, kind in enumerate(kinds.split())]
    values = [decode(kind, raw) for kind, raw in zip(kinds.split(), sources, strict=True)]
    expected = encode(to, np.stack([np.asarray(function(*lane)) for lane in zip(*values, strict=True)]))
    found = result(text, kinds.split(), sources, to)
    if to.startswith(("s", "u", "p")):
        assert found.tolist() == expected.astype(found.dtype).tolist()
        return
    one, other = decode(to, found), decode(to, expected)
    same = (one == other) & (np.signbit(one) == np.signbit(other)) | np.isnan(one) & np.isnan(other)
    assert same.all(), (values, one, other)


@pytest.mark.parametrize(("mode", "expected"), [("rn", [1 + 2**-23, 1.0]), ("rm", [1 + 2**-23, 1 - 2**-24])])
def test_a_fused_product_is_rounded_once(mode: str, expected: list[float]) -> None:
    """Less than a tie, and less than 1, by 2^-70: fp64 holds neither."""
    a, b = [2**-24 * (1 + 2**-23), 2**-35], [1 - 2**-23, -(2**-35)]
    given = {
        f"%r{n}": np.repeat(np.array(x, f32).view(np.uint32), 16) for n, x in enumerate((a, b, [1 + 2**-23, 1]), 1)
    }
    found = run(f"fma.{mode}.ftz.f32 %r4, %r1, %r2, %r3;", given).registers["%r4"].view(f32)
    assert found[::16].tolist() == expected


def test_a_product_of_64_bits_by_its_carry() -> None:
    a, b, c = (drawn("u32", place) for place in range(3))
    lines = "mad.lo.cc.u32 %r4, %r1, %r2, %r3; @%p1 mad.lo.cc.u32 %r4, %r1, 0, 0; madc.hi.u32 %r5, %r1, %r2, %r3;"
    few = np.arange(LANES) % 8 == 0
    machine = run(lines, {"%r1": a, "%r2": b, "%r3": c, "%p1": few}, threads=LANES)
    for lane, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        low = 0 if few[lane] else (x * y & M32) + z
        assert machine.registers["%r4"][lane] == low & M32
        assert machine.registers["%r5"][lane] == (x * y >> 32) + z + (low >> 32) & M32


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["eq", "nan"])
def test_each_half_sets_a_predicate(name: str, kind: str) -> None:
    one, other = drawn(kind, 0).astype(np.uint32), drawn(kind, 1).astype(np.uint32)
    other[::3] = one[::3]
    low, high = one | other << np.uint32(16), other | other << np.uint32(16)
    machine = run(f"setp.{name}.{kind}x2 %p1|%p2, %r1, %r2;", {"%r1": low, "%r2": high}, threads=LANES)
    for lane, (x, y) in enumerate(zip(decode(kind, one), decode(kind, other), strict=True)):
        expected = [x == y, y == y] if name == "eq" else [np.isnan(x) or np.isnan(y), np.isnan(y)]
        assert [machine.registers["%p1"][lane], machine.registers["%p2"][lane]] == expected


def test_bf16_is_rounded_to_nearest_even() -> None:
    """Ties both ways, the largest number to infinity, and what stays."""
    assert encode("bf16", np.array([1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40, 1 + 2**-8])).tolist() == [
        0x3F81,
        0x3F80,
        0x3F80,
    ]
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x3F800000], np.uint32)
    assert encode("bf16", bits.view(f32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x3F80]


def test_e4m3_is_what_pytorch_makes_of_it() -> None:
    torch = pytest.importorskip("torch")
    values = np.concatenate([decode("e4m3", np.arange(256, dtype=np.uint8)), np.linspace(-460, 460, 4001, dtype=f32)])
    ours = encode("e4m3", values)
    theirs = torch.from_numpy(values).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    number = ~np.isnan(values)
    assert (ours[number] == theirs[number]).all()
    assert (ours[~number] & 127 == 127).all()


def test_registers_are_taken_apart_and_put_together() -> None:
    one, two = drawn("b32", 0), drawn("b32", 1)
    lines = "mov.b64 %rd0, {%r1, %r2}; mov.b64 {%r3, %r4}, %rd0; mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r5, {%rs2, %rs1};"
    machine = run(lines, {"%r1": one, "%r2": two}, threads=LANES)
    assert (machine.registers["%rd0"] == one + (two.astype(np.uint64) << np.uint64(32))).all()
    assert (machine.registers["%r3"] == one).all()
    assert (machine.registers["%r4"] == two).all()
    assert (machine.registers["%r5"] == (one << np.uint32(16) | one >> np.uint32(16))).all()


def test_a_guard_leaves_the_others_as_they_are() -> None:
    which = drawn("pred", 0)
    lines = "mov.u32 %r1, 5; @%p1 mov.u32 %r1, 7; @!%p1 add.s32 %r1, %r1, 1;"
    machine = run(lines, {"%p1": which}, threads=LANES)
    assert machine.registers["%r1"].tolist() == [7 if one else 6 for one in which]


def test_lanes_that_part_meet_again() -> None:
    """A loop of as many turns as the lane's number, and one instruction behind it that all reach together."""
    lines = """
        mov.u32 %r1, %tid.x; mov.u32 %r2, 0;
        setp.eq.s32 %p1, %r1, 0;
        @%p1 bra $END;
    $LOOP:
        add.s32 %r2, %r2, %r1; sub.s32 %r1, %r1, 1;
        setp.ne.s32 %p2, %r1, 0;
        @%p2 bra $LOOP;
    $END:
        shfl.sync.idx.b32 %r3, %r2, 3, 31, -1;
    """
    machine = run(lines)
    assert machine.registers["%r2"].tolist() == [n * (n + 1) // 2 for n in range(32)]
    assert set(machine.registers["%r3"].tolist()) == {6}


def test_special_registers() -> None:
    names = ("tid.x", "ctaid.x", "nctaid.x", "ntid.x", "laneid")
    lines = "".join(f"mov.u32 %r{number}, %{name};" for number, name in enumerate(names, 1))
    registers = run(lines, threads=64, blocks=3).registers
    lanes = np.arange(192)
    for number, expected in enumerate((lanes % 64, lanes // 64, lanes * 0 + 3, lanes * 0 + 64, lanes % 32), 1):
        assert (registers[f"%r{number}"] == expected).all()


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.alloc.b32 %r1, %r2",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 %r1, %r2, %r3, %r4",
        "cvt.rna.tf32.f32 %r1, %r2",
        "mul.hi.u64 %rd1, %rd2, %rd3",
        "add.sat.s32 %r1, %r2, %r3",
        "bar.sync 1",
        "ld.local.v2.b32 {%r1, %r2}, [%rd1]",
        "redux.sync.add.s32 %r1, %r2, 15",
        "setp.eq.f16x2 %p1, %r1, %r2",
        "madc.lo.u32 %r1, %r2, %r3, %r4",
        "add.rz.f32 %r1, %r2, %r3",
        "fence.acq_rel.gpu",
        "atom.global.cta.relaxed.add.u32 %r1, [%rd1], %r2",
        "ld.global.gpu.relaxed.b32 %r1, [%rd1]",
    ],
)
def test_what_is_not_modelled_is_refused(text: str) -> None:
    with pytest.raises(Unsupported):
        run(f"{text};")


#: What is tested in test_transfers.py and test_checks.py.
ELSEWHERE = {"ld", "st", "atom", "cp", "fence", "bar", "shfl", "vote", "redux", "ldmatrix", "stmatrix", "mma", "wgmma"}
ELSEWHERE |= {"griddepcontrol"}
#: Opcodes that are tested here, to their last modifier.
TESTED = {text.split()[0] for text, *_ in (*INTEGERS, *FLOATS)} | {
    "mad.lo.cc.u32",
    "madc.hi.u32",
    *(f"setp.{name}.{kind}x2" for name in ("eq", "nan") for kind in ("bf16", "f16")),
}


def test_every_instruction_is_tested() -> None:
    """By its name."""
    assert set(PREPARE) - ELSEWHERE <= {opcode.split(".")[0] for opcode in TESTED}
