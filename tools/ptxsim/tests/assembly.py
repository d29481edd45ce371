"""A few lines of PTX as a kernel, for the executor's own tests: registers are set and read from outside."""

from __future__ import annotations

from collections.abc import Mapping

from tools.ptxsim.asynchronous import Copies, Products
from tools.ptxsim.machine import Machine
from tools.ptxsim.memory import GlobalMemory
from tools.ptxsim.program import prepare
from tools.ptxsim.values import Array

_HEADER = """
.visible .entry kernel({parameters})
.reqntid {threads}
{{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<99>;
    .reg .b64 %rd<9>;
"""


def assembled(lines: str, threads: int = 32, parameters: int = 0) -> str:
    given = ",\n".join(f".param .u64 kernel_param_{number}" for number in range(parameters))
    return _HEADER.format(parameters=given, threads=threads) + lines + "\nret;\n}"


def run(
    lines: str,
    registers: Mapping[str, Array] | None = None,
    *,
    threads: int = 32,
    blocks: int = 1,
    shared: int = 0,
    memory: GlobalMemory | None = None,
    limit: int = 10_000,
    dependent: bool = False,
) -> Machine:
    """The machine after the lines; `registers` are their bits at the start. Parameters are the tensors' addresses."""
    memory = memory or GlobalMemory([])
    count = len(memory.tensors)
    addresses = [memory.address(number) for number in range(count)]
    machine = Machine(
        prepare(assembled(lines, threads, count)), (blocks,), addresses, memory, shared, dependent=dependent
    )
    machine.copies, machine.products = Copies(machine.lanes), Products(machine)
    machine.registers.update(registers or {})
    return machine.run(limit)
