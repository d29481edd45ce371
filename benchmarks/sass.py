"""Machine code of a cubin: its instructions with their source lines, and its loops.

    code = disassemble(cubin)       # by the nvdisasm that Triton brings
    for loop in loops(code):        # of the control flow, innermost first
        [each.opcode for each in loop.own]

A loop is what lies on a way from a block back to one through which every way to it leads, so that code which stands
elsewhere, as waits that turn in place do on sm_100, is no part of another. `own` leaves out the loops inside.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import triton  # type: ignore[import-untyped]

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
#: Jumps through registers, and copies by the tensor memory accelerator: no kernel has them, and no check knows them.
UNKNOWN = ("BRX", "JMX", "JMP", "UBLKCP", "UTMALDG", "ARRIVES")
#: Bytes a thread of loads and copies that are not of four, and registers that an operand spans, by parts of the opcode.
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
_SPANS = {".64": 2, ".WIDE": 2, ".128": 4}
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([\w.]+)\s*(.*?)\s*;")


class UnknownCode(Exception):
    """Machine code that these checks do not model."""


@dataclass(frozen=True)
class Instruction:
    guard: str  # "@!P0", or nothing
    opcode: str  # "LDG.E.128"
    operands: str
    line: str  # of the innermost function in the source, "kernel.py:181"

    @cached_property
    def base(self) -> str:
        return self.opcode.split(".")[0]

    @cached_property
    def width(self) -> int:
        """Bytes that a thread moves."""
        parts = self.opcode.split(".")
        return next((size for part, size in _WIDTHS.items() if part in parts), 4)

    @cached_property
    def target(self) -> str | None:
        """Label of a jump."""
        found = re.search(r"`\((\.L_x_\d+)\)", self.operands)
        return found[1] if found else None

    @cached_property
    def registers(self) -> frozenset[int]:
        """All that it names, those of vectors too."""
        span = max((n for part, n in _SPANS.items() if part in self.opcode), default=4 if "MMA" in self.opcode else 1)
        found = set()
        for number, wide in re.findall(r"\bR(\d+)(\.64)?", self.operands):
            found |= {int(number) + n for n in range(2 if wide else span)}
        return frozenset(found)

    @cached_property
    def written(self) -> frozenset[int]:
        """Results of a load from global memory."""
        number = re.match(r"(?:U?P\w+, )?R(\d+)", self.operands)
        return frozenset(int(number[1]) + n for n in range(max(1, self.width // 4))) if number else frozenset()


@dataclass(frozen=True)
class Block:
    """Instructions that run one after the other."""

    code: tuple[Instruction, ...]
    following: tuple[int, ...]  # blocks


@dataclass(frozen=True)
class Loop:
    body: frozenset[int]  # blocks
    own: tuple[Instruction, ...]  # in the order of addresses, without those of loops inside


def disassemble(cubin: bytes) -> list[Block]:
    """Blocks of the kernel; those of functions that it calls, as of a division, are left out."""
    return parse(tool("nvdisasm", "--print-code", "--print-line-info", cubin=cubin))


def resources(cubin: bytes) -> dict[str, int]:
    """Read what cuobjdump reports: "REG", "STACK" and others."""
    said = tool("cuobjdump", "--dump-resource-usage", cubin=cubin)
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", said.partition(" Function ")[2])}


def tool(name: str, *options: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = (str(TOOLS / name), *options, file.name)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def parse(text: str) -> list[Block]:
    """Blocks of what nvdisasm prints."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    line = ""
    for row in text.splitlines():
        if found := re.match(r"(\.L_x_\d+|\$[\w$]+):", row):
            labels[found[1]] = len(code)
        elif found := re.search(r'//## File "([^"]+)", line (\d+)', row):
            line = f"{Path(found[1]).name}:{found[2]}"
        elif found := _INSTRUCTION.match(row):
            instruction = Instruction((found[2] or "").strip(), found[3], found[4], line)
            if instruction.base in UNKNOWN:
                raise UnknownCode(f"{instruction.opcode} at {line}")
            code.append(instruction)
    ways = [_ways(place, code, labels) for place in range(len(code))]
    starts = {0} | {way for place, found in enumerate(ways) for way in found if found != (place + 1,)}
    starts |= {place + 1 for place, found in enumerate(ways) if found != (place + 1,)} - {len(code)}
    order = sorted(starts | {at for at in labels.values() if at < len(code)})
    number = {start: block for block, start in enumerate(order)}
    ends = [*order[1:], len(code)]
    return [
        Block(tuple(code[start:end]), tuple(number[way] for way in ways[end - 1] if way < len(code)))
        for start, end in zip(order, ends, strict=True)
    ]


def _ways(place: int, code: list[Instruction], labels: dict[str, int]) -> tuple[int, ...]:
    """Places that may follow an instruction."""
    it, after = code[place], place + 1
    if it.base in ("EXIT", "RET"):
        return (after,) if it.guard else ()
    if it.base == "BSYNC":  # where the nearest BSSY of this barrier says
        barrier = it.operands
        pushed = (each for each in reversed(code[:place]) if each.base == "BSSY" and each.operands.startswith(barrier))
        to = next((each.target for each in pushed), None)
        return tuple({after, labels[to]}) if to else (after,)
    if it.base not in ("BRA", "CALL") or it.target is None:
        return (after,)
    sure = it.base == "BRA" and not it.guard and "," not in it.operands
    return (labels[it.target],) if sure else tuple({after, labels[it.target]})


def loops(blocks: list[Block]) -> list[Loop]:
    """Loops, inner ones before those around them.

    Raises UnknownCode where control enters a loop at two places.
    """
    before: list[set[int]] = [set() for _ in blocks]
    reached, last, stack = [], set(), [(0, iter(blocks[0].following))]  # depth first; `last`: on the way to here
    seen, last, backward = {0}, {0}, []
    while stack:
        block, ways = stack[-1]
        for way in ways:
            before[way].add(block)
            if way in last:
                backward.append((block, way))
            if way not in seen:
                seen.add(way)
                last.add(way)
                stack.append((way, iter(blocks[way].following)))
                break
        else:
            stack.pop()
            last.discard(block)
            reached.append(block)
    leading = _leading(reached[::-1], before)
    bodies: dict[int, set[int]] = {}
    for block, head in backward:
        if head not in leading[block]:
            raise UnknownCode(f"a loop with two entries near {blocks[head].code[0].line}")
        body, waiting = bodies.setdefault(head, {head}), [block]
        while waiting:
            if (one := waiting.pop()) not in body:
                body.add(one)
                waiting += before[one]
    found = []
    for body in sorted(bodies.values(), key=len):
        inside = {block for other in bodies.values() if other < body for block in other}
        own = tuple(each for block in sorted(body - inside) for each in blocks[block].code)
        found.append(Loop(frozenset(body), own))
    return found


def _leading(order: list[int], before: list[set[int]]) -> dict[int, set[int]]:
    """Blocks through which every way to a block leads; `order` is one in which ways go forward but for loops."""
    leading = {block: set(order) for block in order}
    leading[order[0]] = {order[0]}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            found = set.intersection(*(leading[one] for one in before[block] if one in leading)) | {block}
            if found != leading[block]:
                leading[block], changed = found, True
    return leading
