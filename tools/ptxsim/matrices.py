"""Warps move and multiply 8 x 8 and 16 x 16 matrices: ldmatrix, stmatrix, mma.sync.

A lane holds numbers 2c and 2c + 1 of row r of an 8 x 8 matrix in one register, r = lane // 4, c = lane % 4. Products
are summed in fp64 and rounded once: tensor cores keep fewer bits, which ones NVIDIA does not say.
"""

from __future__ import annotations

import re

import numpy as np

from tools.ptxsim.machine import WARP, Machine, Mask, Step, executes
from tools.ptxsim.parse import Instruction, Operand, Unsupported, Vector
from tools.ptxsim.values import Array, decode, encode

ROW, COLUMN = np.arange(WARP) // 4, 2 * (np.arange(WARP) % 4)


def registers_of(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _matrix_rows(instruction: Instruction) -> tuple[int, bool]:
    """Matrices, and whether they are transposed on the way."""
    match = re.fullmatch(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", instruction.opcode)
    if match is None:
        raise Unsupported(instruction.opcode)
    return int(match[2]), match[3] is not None


def _row_places(machine: Machine, mask: Mask, address: Operand, count: int, what: str) -> tuple[Array, Array]:
    """Lanes, and the lanes that name rows of 16 bytes: row i of matrix j is named by lane 8 j + i."""
    lanes = machine.whole_warps(mask, what)
    return lanes, lanes[lanes % WARP < 8 * count]


@executes("ldmatrix")
def prepare_ldmatrix(instruction: Instruction) -> Step:
    count, transposed = _matrix_rows(instruction)
    to, address = instruction.operands

    def load(machine: Machine, mask: Mask) -> None:
        lanes, naming = _row_places(machine, mask, address, count, "ldmatrix")
        block, warp = machine.block[naming], machine.warp[naming]
        at = machine.shared.locate(block, machine.address(address, naming), 16, 16)
        found = machine.shared.load(at, block, warp).view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            found = found.swapaxes(2, 3)
        for number, register in enumerate(registers_of(to)):
            low, high = found[:, number, ROW, COLUMN], found[:, number, ROW, COLUMN + 1]
            pair = low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)
            machine.write_lanes(register, lanes, pair.reshape(-1), mask)

    return load


@executes("stmatrix")
def prepare_stmatrix(instruction: Instruction) -> Step:
    count, transposed = _matrix_rows(instruction)
    address, source = instruction.operands

    def store(machine: Machine, mask: Mask) -> None:
        lanes, naming = _row_places(machine, mask, address, count, "stmatrix")
        block, warp = machine.block[naming], machine.warp[naming]
        at = machine.shared.locate(block, machine.address(address, naming), 16, 16)
        rows = np.zeros((len(lanes) // WARP, count, 8, 8), np.uint16)
        for number, register in enumerate(registers_of(source)):
            pair = machine.read(register, 32)[lanes].reshape(-1, WARP)
            rows[:, number, ROW, COLUMN] = (pair & np.uint32(0xFFFF)).astype(np.uint16)
            rows[:, number, ROW, COLUMN + 1] = (pair >> np.uint32(16)).astype(np.uint16)
        if transposed:
            rows = np.ascontiguousarray(rows.swapaxes(2, 3))
        machine.shared.store(at, rows.reshape(-1, 8).view(np.uint8), block, warp)

    return store


@executes("mma")
def prepare_mma(instruction: Instruction) -> Step:
    """D = A · B + C of a warp: A has 16 rows, and B 8 columns, of 32 bytes: 16-bit numbers or E4M3. C and D: fp32."""
    shape, kind = "m16n8k(16|32)", "(b?f16|e4m3)"
    match = re.fullmatch(rf"mma\.sync\.aligned\.{shape}\.row\.col\.f32\.{kind}\.\2\.f32", instruction.opcode)
    if match is None or (match[2] == "e4m3") != (match[1] == "32"):
        raise Unsupported(instruction.opcode)
    inputs, kind = int(match[1]), match[2]
    each = inputs // 8  # numbers of a register
    half, first = inputs // 2, each * (np.arange(WARP) % 4)
    to, left, right, added = (registers_of(operand) for operand in instruction.operands)

    def multiply(machine: Machine, mask: Mask) -> None:
        lanes = machine.whole_warps(mask, "mma.sync")
        warps = len(lanes) // WARP

        def numbers(register: Operand) -> Array:
            """[each, warps, lanes]"""
            bits = np.ascontiguousarray(np.broadcast_to(machine.read(register, 32), machine.lanes)[lanes])
            parts = decode(kind, bits.view(np.uint8 if kind == "e4m3" else np.uint16)).reshape(warps, WARP, each)
            return np.moveaxis(parts.astype(np.float64), 2, 0)

        a, b, c = (np.zeros((warps, *shape)) for shape in ((16, inputs), (inputs, 8), (16, 8)))
        for number, register in enumerate(left):
            for place, values in enumerate(numbers(register)):
                a[:, ROW + 8 * (number % 2), first + half * (number // 2) + place] = values
        for number, register in enumerate(right):
            for place, values in enumerate(numbers(register)):
                b[:, first + half * number + place, ROW] = values
        for number, register in enumerate(added):
            bits = np.broadcast_to(machine.read(register, 32), machine.lanes)[lanes]
            c[:, ROW + 8 * (number // 2), COLUMN + number % 2] = bits.view(np.float32).reshape(warps, WARP)
        found = encode("f32", a @ b + c)
        for number, register in enumerate(to):
            mine = found[:, ROW + 8 * (number // 2), COLUMN + number % 2]
            machine.write_lanes(register, lanes, mine.reshape(-1), mask)

    return multiply
