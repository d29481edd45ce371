"""PTX text to instructions: the subset that Triton emits, inline assembly included.

    @!%p3 ld.global.v2.b32 { %r1, %r2 }, [ %rd4 + 16 ];

becomes Instruction(opcode="ld.global.v2.b32", guard=Guard(%p3, negated), operands=(Vector, Address)).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Bits of what `.reg` declares.
_BITS = {"pred": 1} | {f"{kind}{bits}": bits for kind in "busf" for bits in (8, 16, 32, 64)}
_IGNORED = (".loc\t", ".loc ", ".file", ".section", ".pragma", ".maxn", ".reqn")
_LABEL = re.compile(r"([\w$.]+):(?!:)\s*")


class Unsupported(Exception):  # no fault of the kernel
    """An instruction, or a form of one, that is not modelled."""


@dataclass(frozen=True)
class Register:
    name: str
    bits: int  # 1: a predicate


@dataclass(frozen=True)
class Immediate:
    value: int  # of a float, its bits


@dataclass(frozen=True)
class Symbol:
    """A label, a parameter, a special register (`%tid.x`) or the start of shared memory."""

    name: str


@dataclass(frozen=True)
class Address:
    base: Register | Symbol | Immediate
    offset: int


@dataclass(frozen=True)
class Vector:
    items: tuple[Operand, ...]


Operand = Register | Immediate | Symbol | Address | Vector


@dataclass(frozen=True)
class Guard:
    register: Register
    negated: bool


@dataclass(frozen=True)
class Instruction:
    opcode: str
    guard: Guard | None
    operands: tuple[Operand, ...]
    text: str

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.opcode.split("."))

    @property
    def kind(self) -> str:
        """The type at its end, such as f32."""
        return self.parts[-1]


@dataclass(frozen=True)
class Kernel:
    name: str
    parameters: tuple[tuple[str, str], ...]  # type and name, such as ("u64", "kernel_param_0")
    threads: int  # of a block
    code: tuple[Instruction, ...]
    labels: dict[str, int]  # label -> index in `code`
    local: dict[str, int]  # arrays of a thread: their bytes
    constants: dict[str, bytes]  # arrays of the module that `code` names


def parse(ptx: str) -> Kernel:
    """The only entry point of a module."""
    entry = ptx[ptx.index(".entry") :]
    header = entry[: entry.index("\n{")]
    name = re.match(r"\.entry\s+(\w+)", header)
    threads = re.search(r"\.reqntid (\d+)", header)
    assert name is not None
    assert threads is not None
    body = entry[entry.index("\n{") :]
    body = body.partition("// -- End function")[0]
    registers = _Registers()
    code: list[Instruction] = []
    local: dict[str, int] = {}
    labels: dict[str, int] = {}
    for statement in _statements(body):
        while True:  # scopes and labels before an instruction
            statement = statement.lstrip("{} \t\n")
            if (label := _LABEL.match(statement)) is None:
                break
            labels[label[1]] = len(code)
            statement = statement[label.end() :]
        if statement.startswith(".reg"):
            registers.declare(statement)
        elif array := re.match(r"\.local .*\.b8\s+(\w+)\[(\d+)\]", statement):
            if local:
                raise Unsupported(statement)  # the first lies at 0
            local[array[1]] = int(array[2])
        elif statement and not statement.startswith("."):
            code.append(_instruction(statement, registers))
    parameters = re.findall(r"\.param\s+(?:\.align \d+ )?\.(\w+)[^,\n]*?(\w+_param_\d+)", header)
    used = {operand.name for instruction in code for operand in instruction.operands if isinstance(operand, Symbol)}
    constants = {
        array: bytes(map(int, numbers.split(",")))
        for array, numbers in re.findall(r"\.global .*\.b8 (\S+)\[\d+\] = \{(.*)\};", ptx)
        if array in used
    }
    return Kernel(name[1], tuple(parameters), int(threads[1]), tuple(code), labels, local, constants)


def _statements(body: str) -> list[str]:
    """Split at semicolons, without comments and without directives, which have none."""
    lines = (re.sub(r"//.*", "", line) for line in body.splitlines())
    return "\n".join(line for line in lines if not line.strip().startswith(_IGNORED)).split(";")


class _Registers:
    """Widths of registers: `%r<9>` declares %r0 to %r8, inline assembly declares single names."""

    def __init__(self) -> None:
        self.families: dict[str, int] = {}
        self.single: dict[str, int] = {}

    def declare(self, statement: str) -> None:
        _, kind, names = statement.split(None, 2)
        for name in names.split(","):
            family, brace, _ = name.strip().partition("<")
            (self.families if brace else self.single)[family] = _BITS[kind[1:]]

    def get(self, name: str) -> Register | None:
        bits = self.single.get(name) or self.families.get(name.rstrip("0123456789"))
        return None if bits is None else Register(name, bits)


def _instruction(statement: str, registers: _Registers) -> Instruction:
    text, guard = " ".join(statement.split()), None
    rest = text
    if rest.startswith("@"):
        condition, rest = rest.split(None, 1)
        register = registers.get(condition.lstrip("@!"))
        assert register is not None, text
        guard = Guard(register, condition[1] == "!")
    opcode, _, operands = rest.partition(" ")
    return Instruction(opcode, guard, tuple(_operand(o, registers) for o in _split(operands)), text)


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    depth, found = 0, [""]
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found if part.strip()]


def _operand(text: str, registers: _Registers) -> Operand:
    if "|" in text:  # two results
        return Vector(tuple(_operand(part, registers) for part in text.split("|")))
    if text.startswith("{"):
        return Vector(tuple(_operand(part, registers) for part in _split(text[1:-1])))
    if text.startswith("["):
        base, _, offset = text[1:-1].replace(" ", "").partition("+")
        found = _operand(base, registers)
        assert isinstance(found, Register | Symbol | Immediate), text
        return Address(found, int(offset or "0", 0))
    if (register := registers.get(text)) is not None:
        return register
    if re.fullmatch(r"0[fd][0-9A-Fa-f]+", text):
        return Immediate(int(text[2:], 16))
    if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", text):
        return Immediate(int(text.rstrip("U"), 0))
    if text in ("true", "false"):
        return Immediate(int(text == "true"))
    return Symbol(text)
