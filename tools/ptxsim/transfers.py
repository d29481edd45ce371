"""Loads, stores, additions to memory, barriers, and what a warp does together without tensor cores."""

from __future__ import annotations

from typing import Any

import numpy as np

from tools.ptxsim.machine import WARP, Machine, Mask, Step, executes
from tools.ptxsim.parse import Address, Instruction, Operand, Symbol, Unsupported, Vector
from tools.ptxsim.values import SIGNED, UNSIGNED, Array, width

_SPACES = ("param", "global", "shared", "local")


@executes("ld", "st")
def prepare_transfer(instruction: Instruction) -> Step:
    """One to eight numbers of a lane, at an address that is a multiple of their size."""
    name, space, *_ = instruction.parts
    if instruction.opcode == "ld.global.gpu.acquire.b32":
        return _prepare_reading(instruction)
    if space not in _SPACES or {"volatile", "relaxed", "acquire", "release"} & set(instruction.parts):
        raise Unsupported(instruction.opcode)
    if space == "local" and {"v2", "v4"} & set(instruction.parts):
        raise Unsupported(instruction.opcode)
    kind, bits = instruction.kind, width(instruction.kind)
    place, data = instruction.operands if name == "st" else instruction.operands[::-1]
    items: tuple[Operand, ...] = data.items if isinstance(data, Vector) else (data,)
    size = bits // 8 * len(items)

    def extended(numbers: Array) -> Array:
        """Signed numbers may go to wider registers."""
        return numbers.view(SIGNED[bits]).astype(np.int64).view(np.uint64) if kind[0] == "s" else numbers

    def load_parameter(machine: Machine, mask: Mask) -> None:
        assert isinstance(place, Address)
        assert isinstance(place.base, Symbol)
        value = machine.arguments[place.base.name] >> 8 * place.offset & (1 << bits) - 1
        machine.write(items[0], extended(np.array([value], UNSIGNED[bits])), mask)

    def load(machine: Machine, mask: Mask) -> None:
        lanes = machine.lanes_of(mask)
        address, block = machine.address(place, lanes), machine.block[lanes]
        if space == "global":
            constant = "nc" in instruction.parts
            numbers = machine.memory.load(address, bits, len(items), machine.at(lanes), constant=constant)
        elif space == "local":
            numbers = machine.local.load(address, bits, lanes)
        else:
            at = machine.shared.locate(block, address, size, size)
            numbers = machine.shared.load(at, block, machine.warp[lanes]).view(UNSIGNED[bits])
        for column, item in enumerate(items):
            machine.write_lanes(item, lanes, extended(np.ascontiguousarray(numbers[:, column])), mask)

    def store(machine: Machine, mask: Mask) -> None:
        lanes = machine.lanes_of(mask)
        address, block = machine.address(place, lanes), machine.block[lanes]
        numbers = np.stack([np.broadcast_to(machine.read(item, bits), machine.lanes)[lanes] for item in items], 1)
        numbers = numbers.astype(UNSIGNED[bits])  # of a wider register the lowest bits
        if space == "global":
            machine.memory.store(address, numbers, machine.at(lanes))
        elif space == "local":
            machine.local.store(address, numbers, lanes)
        else:
            at = machine.shared.locate(block, address, size, size)
            machine.shared.store(at, numbers.view(np.uint8), block, machine.warp[lanes])

    return load_parameter if space == "param" else load if name == "ld" else store


#: In which order the lanes of one atomic instruction come to memory: 1, or -1 for the last lane first.
TURN = 1


#: Orders of an addition: whether it releases what its block has written, and acquires what others have.
_ORDERS = {"relaxed": (False, False), "acquire": (False, True), "release": (True, False), "acq_rel": (True, True)}


def _prepare_reading(instruction: Instruction) -> Step:
    """A reading of what other blocks add to, which acquires: an addition of 0."""
    to, place = instruction.operands

    def read(machine: Machine, mask: Mask) -> None:
        lanes = machine.lanes_of(mask)
        nothing, by = np.zeros(len(lanes), np.uint32), machine.at(lanes)
        found = machine.memory.add(machine.address(place, lanes), nothing, by, machine.blocks, *_ORDERS["acquire"])
        machine.write_lanes(to, lanes, found, mask)

    return read


@executes("atom")
def prepare_atomic(instruction: Instruction) -> Step:
    """An addition that all of the GPU sees at once; blocks learn by it what others have written."""
    to, place, source = instruction.operands
    found = [order for order in _ORDERS if instruction.opcode == f"atom.global.gpu.{order}.add.u32"]
    if not found:
        raise Unsupported(instruction.opcode)
    order = _ORDERS[found[0]]

    def add(machine: Machine, mask: Mask) -> None:
        lanes = machine.lanes_of(mask)[::TURN]
        numbers = np.broadcast_to(machine.read(source, 32), machine.lanes)[lanes]
        old = machine.memory.add(machine.address(place, lanes), numbers, machine.at(lanes), machine.blocks, *order)
        machine.write_lanes(to, lanes[::TURN], old[::TURN], mask)

    return add


@executes("bar")
def prepare_barrier(instruction: Instruction) -> Step:
    """Prepare a barrier of a block, or of a warp."""
    of_warp = instruction.parts[1] == "warp"
    if not of_warp and instruction.text != "bar.sync 0":
        raise Unsupported(instruction.text)

    def wait(machine: Machine, mask: Mask) -> None:
        if of_warp:
            machine.whole_warps(mask, "bar.warp.sync")
        else:
            machine.shared.barrier(machine.whole_blocks(mask, "bar.sync"))

    return wait


@executes("griddepcontrol")
def prepare_grid_dependency(instruction: Instruction) -> Step:
    """Wait for the kernels before, or let the next one in: one kernel runs at a time here, so nothing comes of that."""
    if instruction.opcode not in ("griddepcontrol.wait", "griddepcontrol.launch_dependents"):
        raise Unsupported(instruction.opcode)
    waits = instruction.parts[1] == "wait"

    def control(machine: Machine, mask: Mask) -> None:
        if waits:
            machine.waited[machine.lanes_of(mask)] = True

    return control


@executes("shfl")
def prepare_shuffle(instruction: Instruction) -> Step:
    """A register of another lane of the warp; past the end of its segment, its own."""
    mode = instruction.parts[2]
    to, source, other, clamp, _ = instruction.operands

    def shuffle(machine: Machine, mask: Mask) -> None:
        machine.whole_warps(mask, "shfl.sync")
        lane = np.arange(machine.lanes) % WARP
        by, bound = machine.read(other, 32).astype(np.int64) & 31, machine.read(clamp, 32).astype(np.int64)
        segment = bound >> 8 & 31
        first, last = lane & segment, (lane & segment) | (bound & 31 & ~segment)
        wanted = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first | (by & ~segment)}[mode]
        inside = wanted >= last if mode == "up" else wanted <= last
        given = np.broadcast_to(machine.read(source, 32), machine.lanes)
        machine.write(to, given[machine.all_lanes - lane + np.where(inside, wanted, lane)], mask)

    return shuffle


@executes("vote")
def prepare_vote(instruction: Instruction) -> Step:
    """A predicate of all lanes of the warp: its bits, or whether any or all have it."""
    mode, (to, source, _) = instruction.parts[2], instruction.operands

    def vote(machine: Machine, mask: Mask) -> None:
        machine.whole_warps(mask, "vote.sync")
        given = np.broadcast_to(machine.read(source, 1), machine.lanes).reshape(-1, WARP)
        bits = (given * (1 << np.arange(WARP, dtype=np.uint64))).sum(1).astype(np.uint32)
        found = {"ballot": bits, "any": given.any(1), "all": given.all(1)}[mode]
        machine.write(to, np.repeat(found, WARP), mask)

    return vote


_REDUCE: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@executes("redux")
def prepare_reduction(instruction: Instruction) -> Step:
    """One integer of all lanes of the warp, for all of them."""
    _, _, name, kind = instruction.parts
    to, source, members = instruction.operands
    if name not in _REDUCE or kind not in ("s32", "u32", "b32"):
        raise Unsupported(instruction.opcode)

    def reduce(machine: Machine, mask: Mask) -> None:
        lanes = machine.whole_warps(mask, "redux.sync")
        named = np.broadcast_to(machine.read(members, 32), machine.lanes)[lanes]
        if (named != np.uint32(0xFFFFFFFF)).any():
            raise Unsupported(f"{instruction.opcode} of a part of a warp")
        given = np.broadcast_to(machine.value(source, kind), machine.lanes).reshape(-1, WARP)
        found = _REDUCE[name].reduce(given, axis=1, dtype=given.dtype)
        machine.write_value(to, kind, np.repeat(found, WARP), mask)

    return reduce
