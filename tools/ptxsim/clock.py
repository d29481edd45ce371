"""Cycles of a launch by arithmetic: when each warp could issue each instruction that the executor runs.

An instruction waits for its operands, and within a basic block for nothing else: ptxas orders what is independent. Each
takes a turn of one of the four schedulers that a block's warps share; a branch, a barrier, the wait for the kernels
before and the end wait for all before them. So the sum is a bound of what the chain of dependent instructions and the
number of all take, on a multiprocessor that runs one block; it knows no bank conflicts, no limit of the memory's
bandwidth, and not the moves that ptxas adds and leaves out.

    numbers are cycles of an H100, rounded up:        ALU 5, special functions 20, shuffles and reductions of a warp 28,
    shared memory 30, the L1 cache 38, the L2 cache 270 for sectors of 32 bytes that the block reads first
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from tools.ptxsim.parse import Address, Immediate, Instruction, Operand, Register, Symbol, Vector
from tools.ptxsim.values import Array

ALU, SPECIAL, EXCHANGE, SHARED, L1, L2, BARRIER = 5, 20, 28, 30, 38, 270, 25
SCHEDULERS, SECTOR = 4, 32
_TWICE = {"add", "sub", "mul", "mad", "selp", "setp", "min", "max", "and", "or", "xor", "shl", "shr", "neg"}
_SPECIAL = {"ex2", "lg2", "rsqrt", "rcp", "sqrt", "sin", "cos", "div", "rem", "tanh"}
_STOP = {"bra", "ret", "bar", "griddepcontrol"}


@dataclass
class Clock:
    """The warps of a launch; warps of one block share schedulers."""

    warps: int
    warps_a_block: int
    registers: dict[str, Array] = field(default_factory=dict)  # [warps], when each is ready
    sectors: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # by block

    def __post_init__(self) -> None:
        self.begun, self.last = np.zeros((2, self.warps), np.int64)  # of the basic block: its start, its latest issue
        self.slots = np.zeros((self.warps // self.warps_a_block, SCHEDULERS), np.int64)  # issued since
        self.block = np.arange(self.warps) // self.warps_a_block
        self.scheduler = np.arange(self.warps) % self.warps_a_block % SCHEDULERS

    @property
    def cycles(self) -> int:
        """Until the last warp of any block ends."""
        return int(self._ends().max())

    def _ends(self) -> Array:
        turns: Array = self.begun + self.slots[self.block, self.scheduler]
        return np.maximum(turns, self.last)

    def issue(self, instruction: Instruction, warps: Array, addresses: Array | None) -> None:
        """`warps` [n] issue it; addresses [lanes of each warp, by warp] of a load or store of global memory."""
        name = instruction.parts[0]
        at = self.begun[warps]
        if instruction.guard is not None:
            at = np.maximum(at, self._ready(instruction.guard.register, warps))
        stores = name == "st" or name in _STOP
        operands = instruction.operands
        for operand in operands if stores else operands[1:]:
            at = np.maximum(at, self._ready(operand, warps))
        wide = name in _TWICE and instruction.kind.endswith("64")
        np.add.at(self.slots, (self.block[warps], self.scheduler[warps]), 1 + wide)
        self.last[warps] = np.maximum(self.last[warps], at)
        if name in _STOP:
            self._stop(name, warps)
            return
        if name == "st" and addresses is not None:
            for row, warp in enumerate(warps):
                self.stored(warp, addresses[row])
        if not stores:
            latency = self._latency(instruction, warps, addresses)
            for register in _registers(operands[0]):
                known = self.registers.setdefault(register.name, np.zeros(self.warps, np.int64))
                known[warps] = at + latency

    def _stop(self, name: str, warps: Array) -> None:
        ends = self._ends()
        if name == "bar":
            for block in np.unique(self.block[warps]):
                own = self.block == block
                ends[own] = ends[own].max() + BARRIER
        blocks = np.unique(self.block[warps])
        own = np.isin(self.block, blocks)
        self.begun[own] = self.last[own] = ends[own]
        self.slots[blocks] = 0

    def _ready(self, operand: Operand, warps: Array) -> Array:
        found = np.zeros(len(warps), np.int64)
        for register in _registers(operand):
            if register.name in self.registers:
                found = np.maximum(found, self.registers[register.name][warps])
        return found

    def _latency(self, instruction: Instruction, warps: Array, addresses: Array | None) -> Array | int:
        name, *parts = instruction.parts
        if name in ("shfl", "redux", "vote", "ldmatrix"):
            return EXCHANGE
        if name in _SPECIAL:
            return SPECIAL
        if name == "atom":
            return L2
        if name == "ld" and "global" in parts and addresses is not None:
            return np.array([self._fetched(warp, addresses[row]) for row, warp in enumerate(warps)])
        return SHARED if name == "ld" and "shared" in parts else ALU

    def _fetched(self, warp: int, addresses: Array) -> int:
        known = self.sectors[int(self.block[warp])]
        asked = {int(sector) for sector in addresses // SECTOR if sector}
        missing = asked - known
        known |= missing
        return L2 if missing else L1

    def stored(self, warp: int, addresses: Array) -> None:
        """Sectors that a warp writes are in its L1 cache."""
        self.sectors[int(self.block[warp])] |= {int(sector) for sector in addresses // SECTOR if sector}


def _registers(operand: Operand) -> list[Register]:
    if isinstance(operand, Register):
        return [operand]
    if isinstance(operand, Vector):
        return [register for item in operand.items for register in _registers(item)]
    if isinstance(operand, Address):
        return _registers(operand.base)
    assert isinstance(operand, Immediate | Symbol)
    return []
