"""The state of a running kernel, and how its threads take turns.

Every thread of the grid is a lane of NumPy arrays: a register is an array [L]. Lanes at the lowest instruction go first
until they meet others or branch, so that lanes which took different ways meet again where those join. Threads that are
at the same instruction run in lockstep; what a GPU may order otherwise is found by the checks in shared.py and
memory.py. They say nothing of what blocks tell each other by numbers that all add to: of that, `CHOOSE` tries orders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from tools.ptxsim.clock import Clock
from tools.ptxsim.memory import GlobalMemory, Lanes, LocalMemory
from tools.ptxsim.order import DividedWarp, Fault
from tools.ptxsim.parse import Address, Instruction, Kernel, Operand, Register, Symbol, Unsupported, Vector
from tools.ptxsim.shared import SharedMemory
from tools.ptxsim.values import UNSIGNED, Array, decode, encode, width

if TYPE_CHECKING:
    from tools.ptxsim.asynchronous import Copies, Products

WARP = 32
#: Lanes that run an instruction [L]; None: all.
Mask = Array | None
Step = Callable[["Machine", Mask], None]
#: Which of the blocks that are not done run on, until they branch or meet, both [blocks] bool; None: all.
CHOOSE: Callable[[Array], Array] | None = None
#: First part of an opcode -> what prepares an instruction once, so that running it parses nothing.
PREPARE: dict[str, Callable[[Instruction], Step]] = {}


def executes(*names: str) -> Callable[[Callable[[Instruction], Step]], Callable[[Instruction], Step]]:
    """Registers a function that prepares the instructions of these names."""

    def register(prepare: Callable[[Instruction], Step]) -> Callable[[Instruction], Step]:
        PREPARE.update(dict.fromkeys(names, prepare))
        return prepare

    return register


@dataclass(frozen=True)
class Program:
    kernel: Kernel
    steps: tuple[Step | None, ...]  # None: a branch or a return


@lru_cache(maxsize=4096)
def _constant(value: int, bits: int) -> Array:
    found = np.array([value & (1 << bits) - 1 if bits > 1 else value], UNSIGNED[bits])
    found.flags.writeable = False
    return found


class Machine:
    """One launch. `arguments` are the kernel's parameters as integers: addresses, sizes, bits of floats."""

    def __init__(
        self,
        program: Program,
        grid: tuple[int, ...],
        arguments: list[int],
        memory: GlobalMemory,
        shared: int,
        *,
        dependent: bool = False,
    ) -> None:
        kernel = program.kernel
        assert len(arguments) == len(kernel.parameters), f"{kernel.name}: {kernel.parameters}"
        self.program, self.memory = program, memory
        grid = (*grid, *(1,) * (3 - len(grid)))
        self.blocks, self.threads = int(np.prod(grid)), kernel.threads
        self.lanes = self.blocks * self.threads
        self.all_lanes = np.arange(self.lanes)
        #: Lanes [L] that know the kernels before to have ended: all, unless the launch is dependent.
        self.waited = np.full(self.lanes, not dependent)
        self.block, thread = self.all_lanes // self.threads, self.all_lanes % self.threads
        self.warp = (thread // WARP).astype(np.int16)
        self.special = {"%tid.x": thread.astype(np.uint32), "%laneid": (thread % WARP).astype(np.uint32)}
        self.special |= dict.fromkeys(("%tid.y", "%tid.z"), _constant(0, 32))
        for axis, size in enumerate(grid):
            place = self.block // int(np.prod(grid[:axis])) % size
            self.special[f"%ctaid.{'xyz'[axis]}"] = place.astype(np.uint32)
            self.special[f"%nctaid.{'xyz'[axis]}"] = _constant(size, 32)
        self.special[f"%ntid.{'x'}"] = _constant(self.threads, 32)
        self.special |= dict.fromkeys(("global_smem", *kernel.local), _constant(0, 64))
        self.special |= {name: _constant(memory.address(memory.named(name)), 64) for name in kernel.constants}
        self.arguments = {name: value for (_, name), value in zip(kernel.parameters, arguments, strict=True)}
        self.shared = SharedMemory(self.blocks, shared)
        self.local = LocalMemory(self.lanes, sum(kernel.local.values()))
        self.registers: dict[str, Array] = {}
        self.carry = np.zeros(self.lanes, np.uint32)  # the condition code of mad.cc
        self.tracked = any(i.opcode.startswith("wgmma") for i in kernel.code)
        self.touched_at: dict[
            str, int
        ] = {}  # where tracked: number of the last instruction of threads that used a register
        self.executed = 0
        self.counts: Counter[str] = Counter()
        self.active: Mask = None  # lanes of the instruction that runs
        self.clock: Clock | None = None
        self.copies: Copies
        self.products: Products

    # -- operands ------------------------------------------------------------------------------------------------------

    def read(self, operand: Operand, bits: int) -> Array:
        """Bits of an operand [L], or [1] where it is the same for all lanes."""
        if isinstance(operand, Register):
            found = self.registers.get(operand.name)
            if found is None:  # LLVM leaves halves of pairs open that it does not use: NaN, if anything does
                return _constant((1 << operand.bits) - 1, operand.bits)
            if self.tracked:
                self.touched_at[operand.name] = self.executed
                self.products.check_read(operand.name)
            return found
        if isinstance(operand, Symbol):
            if (special := self.special.get(operand.name)) is None:
                raise Unsupported(f"{operand.name} as an operand")
            return special
        assert not isinstance(operand, Address | Vector)
        return _constant(operand.value, bits)

    def value(self, operand: Operand, kind: str) -> Array:
        """Values of an operand as a PTX type."""
        return decode(kind, self.read(operand, width(kind)))

    def write(self, operand: Operand, raw: Array, mask: Mask) -> None:
        """Bits [L] or [1] to a register; wider registers are extended with zeros."""
        if isinstance(operand, Symbol) and operand.name == "_":
            return
        assert isinstance(operand, Register), operand
        if self.tracked:
            self.touched_at[operand.name] = self.executed
            self.products.check_write(operand.name)
        bits = UNSIGNED[operand.bits]
        raw = raw.astype(bits, copy=False)
        if mask is not None:
            old = self.registers.get(operand.name)
            raw = np.where(mask, raw, np.zeros(1, bits) if old is None else old)
        self.registers[operand.name] = raw if len(raw) == self.lanes else np.repeat(raw, self.lanes)

    def write_value(self, operand: Operand, kind: str, value: Array, mask: Mask) -> None:
        self.write(operand, encode(kind, value), mask)

    def write_lanes(self, operand: Operand, lanes: Array, raw: Array, mask: Mask) -> None:
        """Bits of some lanes, those of `mask`."""
        if mask is not None:
            spread = np.zeros(self.lanes, raw.dtype)
            spread[lanes] = raw
            raw = spread
        self.write(operand, raw, mask)

    def address(self, operand: Operand, lanes: Array) -> Array:
        """Addresses [lanes] uint64 of `[register + offset]`."""
        assert isinstance(operand, Address)
        base = np.broadcast_to(self.read(operand.base, 64), self.lanes)[lanes]
        found: Array = base.astype(np.uint64) + np.uint64(operand.offset & (1 << 64) - 1)
        return found

    def lanes_of(self, mask: Mask) -> Array:
        return self.all_lanes if mask is None else np.flatnonzero(mask)

    def at(self, lanes: Array) -> Lanes:
        """Return what memory must know of those that access it. Raises Fault where the kernels before may run still."""
        if not self.waited[lanes].all():
            raise Fault("global access of a dependent launch before griddepcontrol.wait")
        block = self.block[lanes]
        return Lanes(block, self.warp[lanes], self.shared.epoch[block] * self.blocks + block)

    # -- what must not be divided --------------------------------------------------------------------------------------

    def whole_warps(self, mask: Mask, what: str) -> Array:
        """The lanes, all or none of each warp."""
        if mask is not None and (mask.reshape(-1, WARP).any(1) != mask.reshape(-1, WARP).all(1)).any():
            raise DividedWarp(f"{what} by a part of a warp")
        return self.lanes_of(mask)

    def whole_blocks(self, mask: Mask, what: str) -> Array:
        """The blocks, all or no lanes of each."""
        if mask is None:
            return np.arange(self.blocks)
        of_block = mask.reshape(self.blocks, self.threads)
        if (of_block.any(1) != of_block.all(1)).any():
            raise Fault(f"{what} by a part of a block")
        return np.flatnonzero(of_block.all(1))

    def whole_teams(self, mask: Mask, what: str) -> Array:
        """The warpgroups, all or no lanes of each; those of a block one behind the other."""
        size = 4 * WARP
        if self.threads % size:
            raise Fault(f"{what} by a block of {self.threads} threads")
        if mask is None:
            return np.arange(self.lanes // size)
        of_team = mask.reshape(-1, size)
        if (of_team.any(1) != of_team.all(1)).any():
            raise Fault(f"{what} by a part of a warpgroup")
        return np.flatnonzero(of_team.all(1))

    def block_of(self, teams: Array) -> Array:
        return teams * 4 * WARP // self.threads

    # -- taking turns --------------------------------------------------------------------------------------------------

    def run(self, limit: int = 3_000_000) -> Machine:
        """To the end of every thread. Raises Fault, with the instruction, at the first thing a kernel must not do.

        Threads at an instruction for whole warps wait for the others of theirs, as on a GPU; it is a fault if those end
        or wait elsewhere.
        """
        code, end = self.program.kernel.code, len(self.program.kernel.code)
        counter = np.zeros(self.lanes, np.int64)
        waiting: dict[int, DividedWarp] = {}  # by instruction
        with np.errstate(all="ignore"):
            while waiting or counter.min() < end:
                turn = np.where(np.isin(counter, [*waiting]), end, counter) if waiting else counter
                chosen = self._chosen(turn < end) if CHOOSE else True
                at = int(np.where(chosen, turn, end).min() if CHOOSE else turn.min())
                if at == end:
                    raise next(iter(waiting.values()))
                here = chosen & (counter == at)
                later = counter[chosen & (counter > at)]  # of those that wait for others of their warp too
                meets = int(later.min()) if len(later) else end
                mask = None if here.all() else here
                try:
                    while at < meets and not self._branch(code[at], at, here, mask, counter):
                        self._step(code[at], at, mask)
                        at += 1
                except DividedWarp as error:
                    waiting[at], counter[here] = error, at
                    continue
                if at >= meets:
                    counter[here] = at
                for place in waiting.keys() & set(counter[here].tolist() if waiting else ()):
                    del waiting[place]  # others of the warp may have arrived
                if self.executed > limit:
                    raise Fault("the kernel does not end")
        if not self.waited.all():  # who waits for this kernel alone would not wait for those before
            raise Fault("threads of a dependent launch end without griddepcontrol.wait")
        return self

    def _chosen(self, ready: Array) -> Array:
        """Lanes [L] whose turn it can be."""
        blocks = np.logical_or.reduce(ready.reshape(self.blocks, self.threads), axis=1)
        return np.repeat(CHOOSE(blocks) if CHOOSE and blocks.any() else blocks, self.threads)

    def _guarded(self, instruction: Instruction, mask: Mask) -> Mask:
        if instruction.guard is None:
            return mask
        allowed = self.read(instruction.guard.register, 1) != instruction.guard.negated
        allowed = allowed if mask is None else allowed & mask
        return None if allowed.all() else allowed

    def _branch(self, instruction: Instruction, at: int, here: Array, mask: Mask, counter: Array) -> bool:
        """Moves the program counters of lanes at a branch or return; False at any other instruction."""
        if self.program.steps[at] is not None:
            return False
        self.executed += 1
        self.active = mask
        guarded = self._guarded(instruction, mask)
        if self.clock is not None:
            self._issue(instruction, mask, guarded)
        taken = here if guarded is None else here & guarded
        counter[here] = at + 1
        if instruction.opcode.startswith("ret"):
            counter[taken] = len(self.program.steps)
        else:
            (target,) = instruction.operands
            assert isinstance(target, Symbol)
            counter[taken] = self.program.kernel.labels[target.name]
        return True

    def _step(self, instruction: Instruction, at: int, mask: Mask) -> None:
        self.executed += 1
        self.active = mask
        try:
            guarded = self._guarded(instruction, mask)
            if self.clock is not None:
                self._issue(instruction, mask, guarded)
            if guarded is None or guarded.any():
                self.active = guarded
                self.counts[instruction.opcode] += 1
                step = self.program.steps[at]
                assert step is not None
                step(self, guarded)
        except (Fault, Unsupported) as error:
            raise type(error)(f"{error}, at `{instruction.text}`") from None

    def _issue(self, instruction: Instruction, mask: Mask, guarded: Mask) -> None:
        """Tell the clock which warps issue an instruction; one whose lanes are all switched off takes a turn too."""
        assert self.clock is not None
        warps = np.unique(self.lanes_of(mask) // WARP)
        addresses = None
        if instruction.parts[0] in ("ld", "st") and instruction.parts[1] == "global":
            lanes = self.lanes_of(guarded)
            (place,) = (operand for operand in instruction.operands if isinstance(operand, Address))
            touched = np.zeros(self.lanes, np.int64)
            touched[lanes] = self.address(place, lanes).astype(np.int64)
            addresses = touched.reshape(-1, WARP)[warps]
        self.clock.issue(instruction, warps, addresses)
