"""Instructions of one thread on its own registers: moves, comparisons, integers, floats, conversions.

Approximations (`ex2.approx`, `div.full`) are taken as exact and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tools.ptxsim.machine import Machine, Mask, Step, executes
from tools.ptxsim.parse import Instruction, Unsupported, Vector
from tools.ptxsim.values import SIGNED, UNSIGNED, Array, decode, encode, flush, width

Function = Callable[..., Any]


@executes("mov")
def prepare_mov(instruction: Instruction) -> Step:
    """One register to another, or several that make one up, the lowest bits first."""
    to, source = instruction.operands
    bits = width(instruction.kind)

    def unpack(machine: Machine, mask: Mask) -> None:
        assert isinstance(to, Vector)
        each, whole = bits // len(to.items), machine.read(source, bits)
        for place, item in enumerate(to.items):
            machine.write(item, whole >> UNSIGNED[bits](place * each) & UNSIGNED[bits]((1 << each) - 1), mask)

    def pack(machine: Machine, mask: Mask) -> None:
        assert isinstance(source, Vector)
        each, whole = bits // len(source.items), np.zeros(1, UNSIGNED[bits])
        for place, item in enumerate(source.items):
            whole = whole | machine.read(item, each).astype(UNSIGNED[bits]) << UNSIGNED[bits](place * each)
        machine.write(to, whole, mask)

    def move(machine: Machine, mask: Mask) -> None:
        machine.write(to, machine.read(source, bits), mask)

    return unpack if isinstance(to, Vector) else pack if isinstance(source, Vector) else move


@executes("selp")
def prepare_selp(instruction: Instruction) -> Step:
    to, yes, no, which = instruction.operands
    bits = width(instruction.kind)

    def select(machine: Machine, mask: Mask) -> None:
        chosen = np.where(machine.read(which, 1), machine.read(yes, bits), machine.read(no, bits))
        machine.write(to, chosen, mask)

    return select


COMPARE: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_COMBINE: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@executes("setp")
def prepare_setp(instruction: Instruction) -> Step:
    """`.ne` of a NaN is false; `.neu` and the like are true of it. Of packed numbers each half sets a predicate."""
    parts, kind = instruction.parts, instruction.kind
    name, combined = parts[1], next((p for p in parts[2:-1] if p in _COMBINE), None)
    to, first, second, *more = instruction.operands
    unordered = name not in COMPARE and kind.startswith(("f", "bf"))
    compare = {"num": None, "nan": None}.get(name, COMPARE.get(name[:-1] if unordered else name))
    packed = "x" in kind
    if (compare is None and name not in ("num", "nan")) or isinstance(to, Vector) != packed or (packed and combined):
        raise Unsupported(instruction.text)

    def set_predicate(machine: Machine, mask: Mask) -> None:
        x, y = machine.value(first, kind), machine.value(second, kind)
        nan = (x != x) | (y != y)
        if compare is None:
            found = nan if name == "nan" else ~nan
        else:
            found = compare(x, y) | nan if unordered else compare(x, y) & ~nan
        if combined is not None:
            found = _COMBINE[combined](found, machine.read(more[0], 1))
        if not isinstance(to, Vector):
            machine.write(to, found, mask)
            return
        for half, item in enumerate(to.items):
            machine.write(item, found[..., half], mask)

    return set_predicate


# -- integers and predicates -------------------------------------------------------------------------------------------


def _quotient(x: Array, y: Array) -> Array:
    """Towards zero; by 0, anything."""
    y = np.where(y == 0, y.dtype.type(1), y)
    found: Array = (x - np.fmod(x, y)) // y
    return found


def _high(x: Array, y: Array) -> Array:
    """The upper half of the product of 32-bit numbers, in their type."""
    wide = np.int64 if x.dtype.kind == "i" else np.uint64
    found: Array = (x.astype(wide) * y.astype(wide) >> wide(32)).astype(x.dtype)
    return found


INTEGER: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "div": _quotient,
    "neg": np.negative,
    "not": np.invert,
    "abs": np.abs,
    "rem": lambda x, y: np.fmod(x, np.where(y == 0, y.dtype.type(1), y)),
    "hi": _high,
    "popc": lambda x: np.bitwise_count(x).astype(np.uint32),
}


@executes(
    "add",
    "sub",
    "mul",
    "mad",
    "fma",
    "div",
    "rem",
    "min",
    "max",
    "and",
    "or",
    "xor",
    "not",
    "neg",
    "abs",
    "popc",
    "ex2",
    "lg2",
    "rcp",
    "sqrt",
    "rsqrt",
    "tanh",
    "sin",
    "cos",
)
def prepare_arithmetic(instruction: Instruction) -> Step:
    kind = instruction.kind
    if kind.startswith(("f", "bf")):
        return _prepare_float(instruction)
    name, parts, (to, *sources) = instruction.parts[0], instruction.parts, instruction.operands
    if instruction.opcode.startswith("mad.lo.cc"):
        return prepare_carried(instruction)
    product = name == "mad" or name == "mul"
    if {"sat", "cc"} & set(parts) or (product and "hi" in parts and width(kind) != 32):
        raise Unsupported(instruction.opcode)
    wide = kind[0] + str(2 * width(kind)) if "wide" in parts else kind
    function, relu = INTEGER["hi" if "hi" in parts else "mul" if product else name], "relu" in parts
    if relu and (name not in ("min", "max") or kind != "s32"):
        raise Unsupported(instruction.opcode)

    def calculate(machine: Machine, mask: Mask) -> None:
        values = [machine.value(source, kind) for source in sources[: 2 if product else None]]
        if wide != kind:
            values = [
                value.astype(SIGNED[width(wide)] if wide[0] == "s" else UNSIGNED[width(wide)]) for value in values
            ]
        found = function(*values)
        if name == "mad":
            found = found + machine.value(sources[2], wide)
        if relu:
            found = np.maximum(found, 0)
        machine.write_value(to, kind if name == "popc" else wide, found, mask)

    return calculate


@executes("madc")
def prepare_carried(instruction: Instruction) -> Step:
    """Half of a product, a number and the carry of the addition before: `mad.lo.cc` sets it, `madc.hi` adds it."""
    to, *sources = instruction.operands
    sets = instruction.opcode == "mad.lo.cc.u32"
    if not sets and instruction.opcode != "madc.hi.u32":
        raise Unsupported(instruction.opcode)

    def calculate(machine: Machine, mask: Mask) -> None:
        x, y, added = (machine.read(source, 32).astype(np.uint64) for source in sources)
        found = (x * y & _ones("u32")) + added if sets else (x * y >> np.uint64(32)) + added + machine.carry
        if sets:
            carry = (found >> np.uint64(32)).astype(np.uint32)
            machine.carry = np.where(True if mask is None else mask, carry, machine.carry)
        machine.write(to, found & _ones("u32"), mask)

    return calculate


@executes("shl", "shr")
def prepare_shift(instruction: Instruction) -> Step:
    """By the width or more: 0, or the sign."""
    kind, (to, first, second) = instruction.kind, instruction.operands
    bits = width(kind)

    def shift(machine: Machine, mask: Mask) -> None:
        x, by = machine.value(first, kind), machine.read(second, 32)
        small = np.minimum(by, bits - 1).astype(x.dtype)
        found = x << small if instruction.parts[0] == "shl" else x >> small
        if x.dtype.kind == "u" or instruction.parts[0] == "shl":
            found = np.where(by >= bits, found.dtype.type(0), found)
        machine.write_value(to, kind, found, mask)

    return shift


@executes("shf")
def prepare_funnel(instruction: Instruction) -> Step:
    """32 bits of the 64 of (high, low), shifted left or right."""
    _, side, mode, _ = instruction.parts
    to, low, high, count = instruction.operands

    def shift(machine: Machine, mask: Mask) -> None:
        both = machine.read(high, 32).astype(np.uint64) << np.uint64(32) | machine.read(low, 32)
        given = machine.read(count, 32)
        by = (given & np.uint32(31) if mode == "wrap" else np.minimum(given, 32)).astype(np.uint64)
        machine.write(to, both >> by if side == "r" else both << by >> np.uint64(32), mask)

    return shift


@executes("bfe", "bfi")
def prepare_field(instruction: Instruction) -> Step:
    """Extract or insert `length` bits at `start`."""
    kind, bits = instruction.kind, width(instruction.kind)
    to, *sources, start, length = instruction.operands
    if bits != 32:
        raise Unsupported(instruction.opcode)

    def places(machine: Machine) -> tuple[Array, Array]:
        return machine.read(start, 32).astype(np.int64) & 255, machine.read(length, 32).astype(np.int64) & 255

    def extract(machine: Machine, mask: Mask) -> None:
        at, size = places(machine)
        x = machine.value(sources[0], kind).astype(np.int64)  # beyond the top: copies of the sign, or 0
        size = np.minimum(size, 33)
        found = x >> np.minimum(at, 63) & (np.int64(1) << size) - 1
        if kind[0] == "s":
            found = np.where(
                (size > 0) & (found >> np.maximum(size - 1, 0) & 1 == 1), found - (np.int64(1) << size), found
            )
        machine.write(to, found.astype(np.uint32), mask)

    def insert(machine: Machine, mask: Mask) -> None:
        at, size = places(machine)
        field = ((np.int64(1) << np.minimum(size, 32)) - 1) << np.minimum(at, 32) & 0xFFFFFFFF
        x, into = (machine.read(source, 32).astype(np.int64) for source in sources)
        machine.write(to, (into & ~field | x << np.minimum(at, 32) & field).astype(np.uint32), mask)

    return extract if instruction.parts[0] == "bfe" else insert


@executes("prmt")
def prepare_permute(instruction: Instruction) -> Step:
    """Any four of eight bytes; bit 3 of a selector spreads the byte's sign."""
    if instruction.opcode != "prmt.b32":
        raise Unsupported(instruction.opcode)
    to, low, high, selector = instruction.operands

    def permute(machine: Machine, mask: Mask) -> None:
        both = machine.read(high, 32).astype(np.uint64) << np.uint64(32) | machine.read(low, 32)
        select, found = machine.read(selector, 32), np.zeros(1, np.uint64)
        for place in range(4):
            which = (select >> np.uint32(4 * place) & np.uint32(15)).astype(np.uint64)
            byte = both >> (which & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            byte = np.where(which & np.uint64(8), np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0)), byte)
            found = found | byte << np.uint64(8 * place)
        machine.write(to, found, mask)

    return permute


@executes("lop3")
def prepare_logic(instruction: Instruction) -> Step:
    """Any function of three bits, by its truth table."""
    to, *sources, table = instruction.operands

    def logic(machine: Machine, mask: Mask) -> None:
        a, b, c = (machine.read(source, 32) for source in sources)
        (lookup,), found = machine.read(table, 32), np.zeros(1, np.uint32)
        for case in range(8):
            if int(lookup) >> case & 1:
                found = found | (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
        machine.write(to, found, mask)

    return logic


# -- floats ------------------------------------------------------------------------------------------------------------


def _signed_min(x: Array, y: Array) -> Array:
    """`min.xorsign.abs`: the smaller size, with the product's sign."""
    return np.copysign(np.fmin(np.abs(x), np.abs(y)), np.where(np.signbit(x) ^ np.signbit(y), -1.0, 1.0))


def _fused(x: Array, y: Array, z: Array) -> Array:
    """x · y + z of fp32 in fp64, rounded to odd: a number that is not exact ends with a 1, so that it is no tie when it
    is rounded again, and lies on the side where the exact one does.
    """
    product = x * y
    total = product + z
    part = total - product
    error = (product - (total - part)) + (z - part)
    even = total.view(np.int64) & 1 == 0
    moved = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    found: Array = np.where((error != 0) & np.isfinite(error) & even, moved, total)
    return found


def _downwards(value: Array) -> Array:
    """fp64, exact or rounded to odd, to fp32 towards minus infinity."""
    near = value.astype(np.float32)
    found: Array = np.where(near > value, np.nextafter(near, np.float32(-np.inf)), near)
    return found


FLOAT: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "fma": _fused,
    "min": lambda *x: np.fmin.reduce(np.broadcast_arrays(*x)),
    "max": lambda *x: np.fmax.reduce(np.broadcast_arrays(*x)),
    "neg": np.negative,
    "abs": np.abs,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}
_MODES = {"rn", "rm", "ftz", "approx", "full", "xorsign", "abs", "NaN", "sat"}


def _prepare_float(instruction: Instruction) -> Step:
    """In fp64, whose products of fp32 are exact, rounded once to the type."""
    name, *modes, kind = instruction.parts
    to, *sources = instruction.operands
    kinds = [kind] * len(sources)
    if modes[-1:] == ["f32"]:  # add.f32.bf16: what is added to is wider
        kinds[-1] = kind = modes.pop()
    if not _MODES.issuperset(modes) or ("xorsign" in modes and name != "min") or ("rm" in modes and name != "fma"):
        raise Unsupported(instruction.opcode)
    function = _signed_min if "xorsign" in modes else FLOAT[name]

    def calculate(machine: Machine, mask: Mask) -> None:
        values = [machine.value(source, kind) for source, kind in zip(sources, kinds, strict=True)]
        if "ftz" in modes:
            values = [flush(value) for value in values]
        found = function(*(value.astype(np.float64) for value in values))
        if "NaN" in modes:
            found = np.where(np.any(np.isnan(np.broadcast_arrays(*values)), axis=0), np.nan, found)
        if "sat" in modes:
            found = np.nan_to_num(found, nan=0.0).clip(0, 1) + 0.0  # no -0.0
        if "rm" in modes:
            found = _downwards(found)
        if "ftz" in modes:
            found = flush(found.astype(np.float32))
        machine.write_value(to, kind, found, mask)

    return calculate


# -- conversions -------------------------------------------------------------------------------------------------------

_TO_INTEGER = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
_CVT_MODES = {"rn", "rz", "ftz", "sat", "satfinite", *_TO_INTEGER}


@executes("cvt")
def prepare_cvt(instruction: Instruction) -> Step:
    """Between types, rounded to nearest even. Of two sources the first becomes the upper half."""
    *modes, kind, source_kind = instruction.parts[1:]
    to, *sources = instruction.operands
    if (
        not _CVT_MODES.issuperset(modes)
        or kind.startswith("tf")
        or ("rz" in modes and kind != "f16")
        or ("sat" in modes and kind != "f32")
    ):
        raise Unsupported(instruction.opcode)
    whole = next((_TO_INTEGER[mode] for mode in modes if mode in _TO_INTEGER), None)
    from_float, to_float = (k.startswith(("f", "bf", "e4m3")) for k in (source_kind, kind))

    def convert(machine: Machine, mask: Mask) -> None:
        raw = [machine.read(source, width(source_kind)) for source in sources]
        values = [decode(source_kind, bits) for bits in raw]
        if "ftz" in modes and source_kind == "f32":
            values = [flush(value) for value in values]
        found = values[0] if len(values) == 1 else np.stack(np.broadcast_arrays(*values[::-1]), -1)
        if whole is not None:
            found = whole(found)
        if "rz" in modes:
            found = _truncated(found)
        if "sat" in modes:
            found = np.nan_to_num(found, nan=0.0).clip(0, 1) + 0.0  # no -0.0
        if from_float and not to_float:
            limits = np.iinfo(SIGNED[width(kind)] if kind[0] == "s" else UNSIGNED[width(kind)])
            exact = np.nan_to_num(found.astype(np.float64), nan=0.0 if width(kind) < 64 else float(limits.min))
            found = np.where(exact >= limits.max, limits.max, exact.clip(limits.min, limits.max).astype(limits.dtype))
            found = found.astype(limits.dtype)
        elif not from_float and not to_float:
            found = found.astype(np.int64 if source_kind[0] == "s" else np.uint64).view(np.uint64)
        machine.write(to, encode(kind, found) if to_float or from_float else found & _ones(kind), mask)

    return convert


def _truncated(value: Array) -> Array:
    """fp32 to the next fp16 towards zero."""
    near = value.astype(np.float16)
    found: Array = np.where(np.abs(near) > np.abs(value), np.nextafter(near, np.float16(0)), near)
    return found


def _ones(kind: str) -> Any:
    return np.uint64((1 << width(kind)) - 1)


@executes("cvta")
def prepare_cvta(instruction: Instruction) -> Step:
    """Global addresses are generic addresses."""
    to, source = instruction.operands
    if "global" not in instruction.parts:
        raise Unsupported(instruction.opcode)
    return lambda machine, mask: machine.write(to, machine.read(source, 64), mask)
