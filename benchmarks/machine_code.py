"""Rules for the machine code of a kernel as it is served: what must be true of its loops for memory to be kept busy.

An argument is **streamed** if a step reads it from the GPU's memory: weights, K/V pages, logits (`Kernel.streamed` in
tests/plugins/OP/cases.py, held by a test to what a step of Qwen3-8B reads). All others were just written by the step or
are small: they come from the L2 cache, and loops that read nothing else are free. Of the rest:

    overlap    a loop that multiplies tiles has the copies of a whole tile pending at each of its products
    width      every load of a streamed argument, in loops and outside, moves 16 bytes a thread
    in flight  bytes that are pending where the code waits for the first of them: those of one block on a
               multiprocessor, and of as many as fit there. By Little's law `Device.needed` keep the memory busy
    spills     no register is kept in local memory

And of every kernel, since it is launched while the one before still runs (plugins/shared/dependent_launch.py):

    order      on compute capability 9.0 and above, each way through the code waits for the kernels before (ACQBULK)
               ahead of any access to global memory and of its end, lets the next kernel in (PREEXIT) behind that, and
               takes tensor memory before that: or the next might have it, and wait for this one. None of it below 9.0

The first two and the last two are faults, but for EXCEPTIONS; of bytes in flight the shortfall is printed: more of them
take tiles that another bound forbids. Which argument a load reads is found in PTX, by following its address to the
parameters, and carried over to machine code by the source line. Order, waits and widths are the machine code's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.sass import Block, Instruction, Loop, disassemble, loops
from d2sd.plugins.shared.dependent_launch import FIRST_CAPABILITY

#: Seconds from a load to its data where memory is busy, and bytes of a load of full width.
LATENCY, FULL = 0.8e-6, 16
#: Tensor cores' products, of all architectures.
_PRODUCT = re.compile(r"(?:H|Q|I|O|D|HG|QG|IG|UTC\w)MMA")
#: In PTX, the address of a load or a copy from global memory.
_GLOBAL = re.compile(r"cp\.async\.c[ag]\.shared\.global.*\], \[ ?(%rd\d+)|ld\.global\S* .*\[ ?(%rd\d+)")
#: Accesses to memory that other kernels may use.
_ACCESS = {"LDG", "STG", "LDGSTS", "LD", "ST", "ATOM", "ATOMG", "RED", "REDG"}
#: Loops of so many fused sums are products without tensor cores, as of fp32 under IEEE rounding.
_MANY_SUMS = 128


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU of an architecture; published figures."""

    name: str
    bandwidth: float  # bytes a second
    processors: int
    shared: int  # KB of a multiprocessor; a block reserves one more than it uses
    warps: int  # of a multiprocessor
    blocks: int

    @property
    def needed(self) -> float:
        """Bytes in flight, a multiprocessor, that keep its memory busy."""
        return self.bandwidth / self.processors * LATENCY

    def resident(self, warps: int, registers: int, shared: int) -> int:
        """Blocks of these warps, registers a thread and bytes of shared memory that a multiprocessor holds."""
        of_registers = 65536 // (-(-max(registers, 1) * 32 // 256) * 256 * warps)
        return min(self.blocks, self.warps // warps, of_registers, self.shared * 1024 // (shared + 1024))


DEVICES = {
    80: Device("A100", 2.04e12, 108, 164, 64, 32),
    89: Device("L40S", 0.864e12, 142, 100, 48, 24),
    90: Device("H100", 3.35e12, 132, 228, 64, 32),
    100: Device("B200", 8.0e12, 148, 228, 64, 32),
    120: Device("RTX PRO 6000", 1.79e12, 188, 100, 48, 24),
}
#: Part of a variant's name, rule, and why it is excepted.
EXCEPTIONS = (
    ("pool ", "width", "it reads a few KB a row, all at once: one latency whatever the width"),
    ("filters of ", "width", "8 bytes where a row without a peak is read again; wider turns spill"),
    ("fp32 D=", "overlap", FOR_PROOFS := "fp32 is for proofs of losslessness: nobody serves it"),
    ("fp32 D=", "spills", FOR_PROOFS),
    ("tree rule bf16 ", "spills", "at most 56 bytes of 255 registers, where several tiles are in turn"),
    *(
        (kind, "overlap", "four turns over 8 or 16 KB of a state: loads a turn ahead spill")
        for kind in ("tree rule ", "chunk rule ")
    ),
    ("tree rule fp16 ", "spills", "fp16 rows are multiplied in fp32: every published model of this kind is bf16"),
    ("merge 8x128 to 1024", "spills", "8 bytes on sm_100, of 80 registers, in the largest tree: the choice of ptxas"),
    ("embed+norm+rope bf16 ", "spills", "8 bytes on sm_80, of 32 registers a thread: ptxas's choice"),
    (" filtered", "width", "a request's parameter is loaded under the line of the logits, whose loads are of 16 bytes"),
    ("delta inputs bf16/fp8 sums", "spills", "8 bytes on sm_90, of 128 registers: ptxas's choice"),
    ("grow 1024 of 3 sources", "spills", "8 bytes on sm_120, of 128 registers, in the largest tree: ptxas's choice"),
)


@dataclass(frozen=True, slots=True)
class Streamed:
    """A loop that reads streamed arguments, or the code outside of all loops."""

    arguments: tuple[str, ...]
    line: str  # of its first such load
    looped: bool
    product: bool
    tile: int  # bytes a thread and turn
    overlap: int  # of these pending at the product where the fewest are
    in_flight: int  # bytes a thread that are pending at most where the code waits
    narrow: tuple[str, ...]  # loads of less than the full width: "LDG.E.64 of kernel.py:160"

    @property
    def faults(self) -> dict[str, str]:
        """Broken rules, and what is wrong."""
        found = {}
        if self.product and self.looped and self.overlap < self.tile:
            said = f"{self.overlap} of {self.tile} bytes of the next tile"
            found["overlap"] = f"{self.line} waits for {', '.join(self.arguments)}: {said} pending at a product"
        if self.narrow:
            found["width"] = ", ".join(self.narrow)
        return found


def arguments_of_lines(ptx: str, names: list[str]) -> dict[str, frozenset[str]]:
    """By source line, the arguments from which its loads from global memory get their addresses.

    `names`: of the kernel's run-time arguments, in order. Values that were loaded are no part of an address here: a
    page's number comes from the page table, the page from the pool.
    """
    made: dict[str, set[str]] = {}
    lines: dict[str, set[str]] = {}
    line, pointers = "", {n for n, _ in enumerate(names) if f".ptr .global .align 1 {_entry(ptx)}_param_{n}" in ptx}
    for row in ptx.splitlines():
        if found := re.search(r"\.loc\s.*// ([\w.]+:\d+):\d+", row):
            line = found[1]
        elif found := _GLOBAL.search(row):
            lines.setdefault(line, set()).add(found[1] or found[2])
        elif found := re.search(r"ld\.param\.\w+ \t?(%\w+), \[\w+_param_(\d+)", row):
            made.setdefault(found[1], set()).add(f"={found[2]}")
        elif (found := re.search(r"^\s*(?:@!?%p\d+ )?([\w.:]+)\s+(%\w+),(.*);", row)) and not _reads(found[1]):
            made.setdefault(found[2], set()).update(re.findall(r"%(?:rd|r)\d+", found[3]))
    return {
        line: frozenset(names[n] for register in addresses for n in _follow(register, made) & pointers)
        for line, addresses in lines.items()
    }


def _reads(opcode: str) -> bool:
    return opcode.startswith(("ld.", "atom.", "shfl.", "bra"))


def _entry(ptx: str) -> str:
    return re.search(r"\.entry (\w+)\(", ptx)[1]  # type: ignore[index]


def _follow(register: str, made: Mapping[str, set[str]]) -> set[int]:
    found, waiting, seen = set(), [register], set()
    while waiting:
        one = waiting.pop()
        if one.startswith("="):
            found.add(int(one[1:]))
        elif one not in seen:
            seen.add(one)
            waiting += made.get(one, ())
    return found


def streams(cubin: bytes, ptx: str, names: list[str], streamed: tuple[str, ...]) -> list[Streamed]:
    """Report what the rules ask, of each loop of the kernel that reads a streamed argument and of the code outside.

    Raises UnknownCode, or KeyError for a load whose line no load in PTX has.
    """
    of_line = arguments_of_lines(ptx, names)
    blocks = disassemble(cubin)
    found = loops(blocks)
    parts = [(loop.own, True) for loop in found] + [(_outside(blocks, found), False)]
    reports = [_report(code, of_line, frozenset(streamed), looped=looped) for code, looped in parts]
    kept = [report for report in reports if report]
    in_loops = {name for report in kept if report.looped for name in report.arguments}
    # What stands in front of a pipelined loop is its first turns.
    return [one for one in kept if one.looped or one.faults or not in_loops.issuperset(one.arguments)]


def _outside(blocks: list[Block], found: list[Loop]) -> tuple[Instruction, ...]:
    inside = {block for loop in found for block in loop.body}
    return tuple(each for number, block in enumerate(blocks) if number not in inside for each in block.code)


@dataclass
class _Pending:
    """Bytes a thread that were asked for and not waited for."""

    registers: list[tuple[frozenset[int], int]] = field(default_factory=list)  # loads into them
    groups: list[int] = field(default_factory=list)  # of asynchronous copies
    group: int = 0  # the one that is not yet closed

    @property
    def bytes(self) -> int:
        return sum(self.groups) + self.group + sum(count for _, count in self.registers)

    def wait(self, it: Instruction) -> None:
        """Take away what this instruction waits for."""
        used = it.registers
        self.registers = [(those, count) for those, count in self.registers if not those & used]
        if it.base == "DEPBAR" and it.operands.startswith("SB0"):
            left = int(it.operands.split(",")[1], 16)
            self.groups = self.groups[-left:] if left else []


def _report(
    code: tuple[Instruction, ...], of_line: Mapping[str, frozenset[str]], streamed: frozenset[str], *, looped: bool
) -> Streamed | None:
    read = [(it, of_line[it.line]) for it in code if it.base in ("LDG", "LDGSTS")]
    read = [(it, arguments & streamed) for it, arguments in read if arguments & streamed]
    if not read:
        return None
    those = {id(it) for it, _ in read}
    products = [it for it in code if _PRODUCT.fullmatch(it.base)]
    if not products:
        sums = [it for it in code if it.base in ("FFMA", "FFMA2")]
        products = sums if len(sums) >= _MANY_SUMS else []
    multiply = {id(it) for it in products}
    pending, most = _Pending(), 0
    least: list[int] = []
    turns = 8 if looped else 1  # more than any pipeline is deep
    for turn in range(turns):
        least = []
        for it in code:
            before = pending.bytes
            pending.wait(it)
            if pending.bytes < before and turn == turns - 1:
                most = max(most, before)
            if id(it) in multiply:
                least.append(pending.bytes)
            if it.base == "LDGDEPBAR":
                pending.groups.append(pending.group)
                pending.group = 0
            elif id(it) in those and it.base == "LDGSTS":
                pending.group += it.width
            elif id(it) in those:
                pending.registers.append((it.written, it.width))
    return Streamed(
        arguments=tuple(sorted({name for _, names in read for name in names})),
        line=read[0][0].line,
        looped=looped,
        product=bool(products),
        tile=sum(it.width for it, _ in read),
        overlap=min(least, default=0),
        in_flight=max(most, 0 if looped else pending.bytes),
        narrow=tuple(sorted({f"{it.opcode} of {it.line}" for it, _ in read if it.width < FULL})),
    )


def order_faults(blocks: list[Block], capability: int) -> list[str]:
    """List what breaks the rule of order on any way through a kernel."""
    if capability < FIRST_CAPABILITY:
        found = {it.opcode for block in blocks for it in block.code} & {"ACQBULK", "PREEXIT"}
        return [f"{opcode} below compute capability 9.0" for opcode in sorted(found)]
    faults: set[str] = set()
    seen, ways = set(), [(0, False, False)]
    while ways:
        if (way := ways.pop()) in seen:
            continue
        seen.add(way)
        block, waited, let_in = way
        for it in blocks[block].code:
            if it.base == "ACQBULK" and not it.guard:
                waited = True
            elif it.base == "PREEXIT":
                let_in = True
            if not waited and it.base in (*_ACCESS, "EXIT", "PREEXIT"):
                faults.add(f"{it.opcode} of {it.line} before the wait for the kernels before")
            if let_in and it.opcode.startswith("UTCATOMSWS.FIND"):
                faults.add(f"tensor memory is taken at {it.line} when the next kernel was let in")
            if it.base == "EXIT" and waited and not let_in:
                faults.add(f"{it.opcode} of {it.line} before the next kernel is let in")
        ways += [(after, waited, let_in) for after in blocks[block].following]
    return sorted(faults)


def excepted(name: str, rule: str) -> str | None:
    """Why a variant of this name may break the rule."""
    return next((reason for part, of, reason in EXCEPTIONS if part in name and of == rule), None)
