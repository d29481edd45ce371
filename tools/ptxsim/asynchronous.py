"""Copies to shared memory (cp.async) and products (wgmma) run beside the threads until they wait for them.

Both are committed in groups, and `wait_group N` waits for all groups but the latest N.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from tools.ptxsim.machine import WARP, Machine, Mask, Step, executes
from tools.ptxsim.matrices import COLUMN, ROW, registers_of
from tools.ptxsim.order import Fault
from tools.ptxsim.parse import Immediate, Instruction, Operand, Register, Unsupported, Vector
from tools.ptxsim.values import Array, decode, encode

_OPEN = -1  # group of what has not been committed
TEAM = 4 * WARP  # threads of a warpgroup


# -- copies ------------------------------------------------------------------------------------------------------------


@dataclass
class _Copy:
    lanes: Array
    at: Array  # [lanes, bytes] of shared memory
    data: Array  # [lanes, bytes]
    group: Array  # [lanes], _OPEN until committed

    def part(self, which: Array) -> _Copy:
        return _Copy(self.lanes[which], self.at[which], self.data[which], self.group[which])


class Copies:
    """Each lane's copies that have not landed."""

    def __init__(self, lanes: int) -> None:
        self.flying: list[_Copy] = []
        self.committed = np.zeros(lanes, np.int64)  # groups of each lane

    def commit(self, lanes: Array) -> None:
        chosen = np.zeros(len(self.committed), bool)
        chosen[lanes] = True
        for copy in self.flying:
            joins = (copy.group == _OPEN) & chosen[copy.lanes]
            copy.group[joins] = self.committed[copy.lanes[joins]]
        self.committed[lanes] += 1

    def wait(self, machine: Machine, lanes: Array, latest: int) -> None:
        chosen = np.zeros(len(self.committed), bool)
        chosen[lanes] = True
        left = []
        for copy in self.flying:
            done = chosen[copy.lanes] & (copy.group != _OPEN) & (copy.group < self.committed[copy.lanes] - latest)
            landed, rest = copy.part(done), copy.part(~done)
            block, warp = machine.block[landed.lanes], machine.warp[landed.lanes]
            machine.shared.land_copy(landed.at, landed.data, block, warp)
            left += [rest] if len(rest.lanes) else []
        self.flying = left


@executes("cp")
def prepare_copy(instruction: Instruction) -> Step:
    """16, 8 or 4 bytes; of a source size of 0 zeros are written and nothing is read."""
    operands = instruction.operands
    if instruction.opcode == "cp.async.commit_group":
        return lambda machine, mask: machine.copies.commit(machine.lanes_of(mask))
    if instruction.opcode == "cp.async.wait_group":
        latest = _number(operands[0])
        return lambda machine, mask: machine.copies.wait(machine, machine.lanes_of(mask), latest)
    if instruction.opcode == "cp.async.bulk.prefetch.L2.global":
        return _prepare_prefetch(instruction)
    if not re.match(r"cp\.async\.c[ag]\.shared\.global", instruction.opcode):
        raise Unsupported(instruction.opcode)
    to, source, length = operands[:3]
    size = _number(length)

    def copy(machine: Machine, mask: Mask) -> None:
        lanes = machine.lanes_of(mask)
        block, warp = machine.block[lanes], machine.warp[lanes]
        at = machine.shared.locate(block, machine.address(to, lanes), size, size)
        machine.shared.issue_copy(at, block, warp)
        wanted = machine.read(operands[3], 32) if len(operands) > 3 else np.full(1, size, np.uint32)
        wanted = np.broadcast_to(wanted, machine.lanes)[lanes]
        if not np.isin(wanted, (0, size)).all():
            raise Unsupported("cp.async of a part")
        real, data = wanted > 0, np.zeros((len(lanes), size), np.uint8)
        if real.any():
            address = machine.address(source, lanes[real])
            data[real] = machine.memory.load(address, 32, size // 4, machine.at(lanes[real])).view(np.uint8)
        machine.copies.flying.append(_Copy(lanes, at, data, np.full(len(lanes), _OPEN)))

    return copy


def _prepare_prefetch(instruction: Instruction) -> Step:
    """Bytes to the L2 cache, which changes nothing: of what the kernel only reads, before its wait too."""
    place, length = instruction.operands

    def prefetch(machine: Machine, mask: Mask) -> None:
        lanes = machine.lanes_of(mask)
        sizes = np.broadcast_to(machine.read(length, 32), machine.lanes)[lanes].astype(np.int64)
        machine.memory.prefetch(machine.address(place, lanes), sizes)

    return prefetch


def _number(operand: Operand) -> int:
    assert isinstance(operand, Immediate)
    return operand.value


@executes("fence")
def prepare_fence(instruction: Instruction) -> Step:
    if instruction.opcode != "fence.proxy.async.shared::cta":
        raise Unsupported(instruction.opcode)

    def fence(machine: Machine, mask: Mask) -> None:
        machine.shared.fence(machine.whole_blocks(mask, "fence.proxy.async"))

    return fence


# -- products of a warpgroup -------------------------------------------------------------------------------------------


@dataclass
class _Product:
    teams: Array  # warpgroups, those of the first block first
    at: Array  # [teams, bytes] of shared memory that it reads
    results: frozenset[str]
    inputs: frozenset[str]  # registers of A
    group: Array  # [teams], _OPEN until committed


class Products:
    """Each warpgroup's products that have not been waited for."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.flying: list[_Product] = []
        self.committed = np.zeros(machine.lanes // TEAM, np.int64)
        self.fence = np.full(machine.lanes // TEAM, -1)  # number of the last wgmma.fence

    def _uses(self, name: str, *, written: bool) -> bool:
        """Whether a product of a warpgroup that is active writes this register, or reads it where that matters."""
        active = self.machine.active
        for product in self.flying:
            used = name in product.results or (written and name in product.inputs)
            if used and (active is None or active.reshape(-1, TEAM)[product.teams].any()):
                return True
        return False

    def check_read(self, name: str) -> None:
        if self._uses(name, written=False):
            raise Fault(f"{name} is read while wgmma in flight writes it")

    def check_write(self, name: str) -> None:
        if self._uses(name, written=True):
            raise Fault(f"{name} is written while wgmma in flight uses it")

    def issue(self, product: _Product) -> None:
        """Threads must not have used registers of the product behind the last wgmma.fence."""
        fence = int(self.fence[product.teams].min())
        if fence < 0:
            raise Fault("the first wgmma of a kernel without wgmma.fence")
        for name in product.results | product.inputs:
            if self.machine.touched_at.get(name, -1) > fence:
                raise Fault(f"wgmma uses {name}, which threads used since the last wgmma.fence")
        self.flying.append(product)

    def commit(self, teams: Array) -> None:
        for product in self.flying:
            joins = (product.group == _OPEN) & np.isin(product.teams, teams)
            product.group[joins] = self.committed[product.teams[joins]]
        self.committed[teams] += 1

    def wait(self, teams: Array, latest: int) -> None:
        left = []
        for product in self.flying:
            done = np.isin(product.teams, teams) & (product.group != _OPEN)
            done &= product.group < self.committed[product.teams] - latest
            self.machine.shared.end_async(product.at[done], self.machine.block_of(product.teams[done]))
            if not done.all():
                rest = product.teams[~done], product.at[~done], product.results, product.inputs, product.group[~done]
                left.append(_Product(*rest))
        self.flying = left


@executes("wgmma")
def prepare_wgmma(instruction: Instruction) -> Step:
    name = instruction.parts[1]
    if name == "mma_async":
        return _prepare_product(instruction)

    def order(machine: Machine, mask: Mask) -> None:
        teams = machine.whole_teams(mask, instruction.opcode)
        if name == "fence":
            machine.products.fence[teams] = machine.executed
        elif name == "commit_group":
            machine.products.commit(teams)
        else:
            machine.products.wait(teams, _number(instruction.operands[0]))

    return order


def _prepare_product(instruction: Instruction) -> Step:
    """D = A · B (+ D) of four warps: A is 64 x 32 bytes in registers or shared memory, B N x 32 bytes in shared memory.

    Of E4M3, A is in shared memory, and sums keep fewer bits (`_fp8_sums`).
    """
    shape, kinds = r"m64n(\d+)k(16|32)", "(b?f16|e4m3)"
    match = re.fullmatch(rf"wgmma\.mma_async\.sync\.aligned\.{shape}\.f32\.{kinds}\.\3", instruction.opcode)
    if match is None or (match[3] == "e4m3") != (match[2] == "32"):
        raise Unsupported(instruction.opcode)
    columns, length, kind = int(match[1]), int(match[2]), match[3]
    results, left, right, accumulate, *flags = instruction.operands
    from_registers = isinstance(left, Vector)
    if [_number(flag) for flag in flags[:2]] != [1, 1]:
        raise Unsupported("a wgmma that negates")
    if from_registers and kind == "e4m3":
        raise Unsupported("a wgmma of E4M3 in registers")
    flags += [Immediate(0), Immediate(0)] if kind == "e4m3" else []  # it transposes nothing
    transposed = [bool(_number(flag)) for flag in flags[2:]]  # of A, where it is in memory, and of B
    outputs = registers_of(results)

    def multiply(machine: Machine, mask: Mask) -> None:
        teams = machine.whole_teams(mask, "wgmma")
        blocks = machine.block_of(teams)
        parts = []

        def from_memory(operand: Operand, rows: int, turned: bool) -> Array:
            at = _named_by(_same(machine, operand, teams), machine.shared.size, rows, turned)
            at = at + (blocks * machine.shared.size)[:, None]
            parts.append(at)
            data = machine.shared.load_async(at, blocks).view(np.uint8 if kind == "e4m3" else np.uint16)
            return decode(kind, data).reshape(-1, rows, length).astype(np.float64)

        if from_registers:
            a = _gather_a([_of_teams(machine, register, teams) for register in registers_of(left)], kind)
        else:
            a = from_memory(left, 64, transposed[0])
        b = from_memory(right, columns, transposed[-1])
        adds, before = _same(machine, accumulate, teams, bits=1).astype(bool), np.zeros((1, 1, 1))
        if adds.any():
            before = np.where(adds[:, None, None], _accumulator(machine, outputs, teams, columns), 0)
        b = b.swapaxes(1, 2)
        product = _fp8_sums(a, b, before) if kind == "e4m3" else a @ b + before
        inputs = _names(registers_of(left)) if from_registers else frozenset()
        group = np.full(len(teams), _OPEN)
        machine.products.issue(_Product(teams, np.concatenate(parts, 1), _names(outputs), inputs, group))
        _scatter(machine, outputs, teams, encode("f32", product))

    return multiply


#: Bits behind the first that Hopper's sums of E4M3 products keep, by SageAttention2 ("FP22", arXiv 2411.10958);
#: DeepSeek-V3's report (arXiv 2412.19437) counts the first and has 14.
_FP8_BITS = 13


def _fp8_sums(a: Array, b: Array, before: Array) -> Array:
    """a [teams, M, K] · b [teams, K, N] + before: all addends are cut off at the last bit of the largest, and so is the
    sum.
    """
    shape = len(a), a.shape[1], b.shape[2]
    addends = np.concatenate([a[..., None] * b[:, None], np.broadcast_to(before, shape)[:, :, None]], 2)
    kept = _cut(addends, np.abs(addends).max(2, keepdims=True)).sum(2)
    return _cut(kept, np.abs(kept))


def _cut(value: Array, largest: Array) -> Array:
    """Towards zero, where the largest has its last bit."""
    last = np.ldexp(1.0, np.frexp(largest)[1] - 1 - _FP8_BITS)
    cut: Array = np.trunc(value / last) * last
    return cut


def _names(operands: tuple[Operand, ...]) -> frozenset[str]:
    return frozenset(operand.name for operand in operands if isinstance(operand, Register))


def _of_teams(machine: Machine, register: Operand, teams: Array) -> Array:
    """A register as [teams, 4 warps, lanes]; what a product in flight writes may not be A."""
    assert isinstance(register, Register)
    machine.products.check_read(register.name)
    return machine.registers[register.name].reshape(-1, 4, WARP)[teams]


def _same(machine: Machine, operand: Operand, teams: Array, bits: int = 64) -> Array:
    """An operand that all threads of a warpgroup must have in common [teams]."""
    values = np.broadcast_to(machine.read(operand, bits), machine.lanes).reshape(-1, TEAM)[teams]
    if (values != values[:, :1]).any():
        raise Fault("an operand of wgmma differs within the warpgroup")
    first: Array = values[:, 0]
    return first


def _gather_a(registers: list[Array], kind: str) -> Array:
    a = np.zeros((len(registers[0]), 4, 16, 16))
    for number, bits in enumerate(registers):
        row, column = ROW + 8 * (number % 2), COLUMN + 8 * (number // 2)
        a[:, :, row, column], a[:, :, row, column + 1] = np.moveaxis(decode(f"{kind}x2", bits), -1, 0)
    return a.reshape(-1, 64, 16)


def _places_of(number: int) -> tuple[Array, Array]:
    """Row and column of register `number` of a lane in a warp's 16 rows of D."""
    return ROW + 8 * (number % 4 // 2), 8 * (number // 4) + COLUMN + number % 2


def _accumulator(machine: Machine, outputs: tuple[Operand, ...], teams: Array, columns: int) -> Array:
    """D as it is, which a product in flight of the same shape may be about to write."""
    found = np.zeros((len(teams), 4, 16, columns))
    for number, register in enumerate(outputs):
        assert isinstance(register, Register)
        row, column = _places_of(number)
        bits = machine.registers[register.name]
        found[:, :, row, column] = bits.view(np.float32).reshape(-1, 4, WARP)[teams]
    return found.reshape(-1, 64, columns)


def _scatter(machine: Machine, outputs: tuple[Operand, ...], teams: Array, bits: Array) -> None:
    """Straight to the registers: nobody may look before the wait."""
    bits = bits.reshape(len(teams), 4, 16, -1)
    for number, register in enumerate(outputs):
        assert isinstance(register, Register)
        row, column = _places_of(number)
        old = machine.registers.get(register.name)
        new = np.zeros(machine.lanes, np.uint32) if old is None else old.copy()
        new.reshape(-1, 4, WARP)[teams] = bits[:, :, row, column]
        machine.registers[register.name] = new


def _named_by(descriptor: Array, size: int, rows: int, turned: bool) -> Array:
    """Places [blocks, rows · 16 · 2] of the bytes of 16-bit numbers that matrix descriptors name, row by row.

    Bits 0-13, 16-29 and 32-45 are start, leading and stride offset in 16 bytes; 62-63 name the swizzle: lines of 128,
    64 or 32 bytes whose 16-byte pieces are exchanged by the bits of the line's number. `turned`: rows are contiguous.
    """
    fields = [(descriptor >> np.uint64(shift) & np.uint64(0x3FFF)).astype(np.int64) << 4 for shift in (0, 16, 32)]
    start, leading, stride = (field[:, None, None] for field in fields)
    swizzle, offset = descriptor >> np.uint64(62), descriptor >> np.uint64(49) & np.uint64(7)
    if (swizzle != swizzle[0]).any() or swizzle[0] == 0 or offset.any():
        raise Unsupported("a matrix descriptor without swizzle, or with a base offset")
    line = {1: 128, 2: 64, 3: 32}[int(swizzle[0])]
    row, column = np.arange(rows)[:, None], np.arange(16)[None]
    if turned:
        each = line // 2
        linear = start + row // each * leading + column // 8 * stride + column % 8 * line + row % each * 2
    else:
        linear = start + row // 8 * stride + row % 8 * line + 2 * column
    place = linear ^ (linear >> 7 & line // 16 - 1) << 4
    if (place + 2 > size).any():
        raise Fault("wgmma reads outside shared memory")
    found: Array = (place[..., None] + np.arange(2)).reshape(len(descriptor), -1)
    return found
