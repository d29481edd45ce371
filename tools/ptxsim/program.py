"""From PTX text to a run: parses and prepares every instruction once."""

from __future__ import annotations

from functools import lru_cache

from tools.ptxsim import asynchronous, matrices, scalar, transfers
from tools.ptxsim.asynchronous import Copies, Products
from tools.ptxsim.clock import Clock
from tools.ptxsim.machine import PREPARE, WARP, Machine, Program, Step
from tools.ptxsim.memory import GlobalMemory
from tools.ptxsim.parse import Instruction, Unsupported, parse

assert asynchronous, matrices  # imported for the instructions that they register
assert scalar, transfers


@lru_cache(maxsize=64)
def prepare(ptx: str) -> Program:
    """Raises Unsupported where an instruction is not modelled."""
    kernel = parse(ptx)
    return Program(kernel, tuple(map(_prepare, kernel.code)))


def _prepare(instruction: Instruction) -> Step | None:
    if instruction.parts[0] in ("bra", "ret"):
        return None
    found = PREPARE.get(instruction.parts[0])
    if found is None:
        raise Unsupported(instruction.opcode)
    return found(instruction)


def execute(
    ptx: str,
    grid: tuple[int, ...],
    arguments: list[int],
    memory: GlobalMemory,
    shared: int = 0,
    limit: int = 3_000_000,
    *,
    timed: bool = False,
    dependent: bool = False,
) -> Machine:
    """Run a kernel over `memory`. Raises Fault at the first thing that it must not do.

    `timed`: with a clock. `dependent`: launched as such, so that the kernels before may run until it waits for them.
    """
    machine = Machine(prepare(ptx), grid, arguments, memory, shared, dependent=dependent)
    if timed:
        machine.clock = Clock(machine.lanes // WARP, machine.threads // WARP)
    machine.copies, machine.products = Copies(machine.lanes), Products(machine)
    return machine.run(limit)
