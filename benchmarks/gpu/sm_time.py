"""Cycles of a kernel on one SM, from its machine code: an estimate by counting, where no GPU can be asked.

    ends, busy = cycles([trace_of(compiled.cubin, turns)], H100, warps=2)

ptxas writes into each instruction how long its warp waits before the next one, which of six scoreboards its result
sets, and which it waits for. One of an SM's four schedulers is played: the warps it holds, each over the same
instructions, issue one a cycle, of those that are ready the one that waited longest. Pipes are busy as published;
loads, copies and atomic operations take the latencies of `Machine`, copies also the SM's share of the bandwidth. Code
in front of and behind loops runs once, also what a branch would skip; a loop runs as often as `turns` says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from benchmarks.sass import Block, Instruction, loops, parse, tool

#: Of a product of 64 rows.
_COLUMNS = re.compile(r"64x(\d+)x")
_ENCODED = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
#: Cycles that a warp's instruction keeps a pipe of its scheduler busy, by first parts of opcodes; fp32 sums take 1.
_ALU = frozenset(
    "FMNMX FSEL ISETP FSETP IADD3 VIADD LOP3 SHF LEA SEL F2FP PRMT IMNMX VIMNMX PLOP3 CS2R MOV".split()  # noqa: SIM905
)
_PIPES = {"alu": 2, "mufu": 8, "memory": 4, "fma": 1}


@dataclass(frozen=True)
class Machine:
    """A GPU: cycles, and bytes a cycle and SM."""

    clock: float  # cycles a second
    processors: int
    memory: float  # bytes a cycle and SM of the GPU's memory
    cache: float  # of the L2 cache
    from_memory: int  # latencies
    from_cache: int
    atomic: int
    fence: int
    shared: int
    shuffle: int
    exponent: int
    product: int  # of wgmma, behind the last
    barrier: int


#: 989 TFLOP/s are 2,048 products a cycle and SM at 1.83 GHz. Latencies: "Dissecting the NVIDIA Hopper Architecture
#: through Microbenchmarking" has 263 cycles to the L2 cache and 479 to memory; here with room for a busy memory.
H100 = Machine(1.83e9, 132, 3.35e12 / 132 / 1.83e9, 64, 800, 300, 300, 400, 30, 25, 23, 40, 20)


@dataclass(frozen=True)
class Step:
    """An instruction with what its encoding says."""

    it: Instruction
    stall: int
    sets: int | None  # scoreboard of its result
    read: int | None  # scoreboard of its operands: they may be overwritten
    waits: int  # mask of scoreboards
    moves: bool = True  # a copy that reads something, and is not switched off for all threads


@dataclass
class _Warp:
    block: int
    steps: list[Step]
    at: int = 0
    issued: float = -1.0
    ready: float = 0.0  # when it may issue again
    boards: list[float] = field(default_factory=lambda: [0.0] * 6)
    groups: list[float] = field(default_factory=list)  # when copies have arrived
    group: float = 0.0
    product: float = 0.0


def trace_of(
    cubin: bytes,
    turns: Callable[[tuple[Instruction, ...]], int],
    *,
    skips: Callable[[tuple[Instruction, ...], int], bool] = lambda code, turn: False,
    products: bool = False,
) -> list[Step]:
    """The instructions of a warp from start to end; `turns` says how often a loop of these instructions runs.

    `skips`: whether a block of a loop that a branch can skip is skipped in this turn. `products`: also blocks that
    multiply and are in no loop, which a branch may skip.
    """
    text = tool("nvdisasm", "--print-code", "--print-line-info", "--print-instruction-encoding", cubin=cubin)
    words = [int(word, 16) for word in _ENCODED.findall(text)]
    blocks = parse(text)
    flat = [it for block in blocks for it in block.code]
    assert len(words) == 2 * len(flat), f"{len(words)} words of {len(flat)} instructions"
    steps = [_step(it, words[2 * place + 1]) for place, it in enumerate(flat)]
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + len(block.code))
    inner: list[tuple[int, frozenset[int]]] = []
    for loop in loops(blocks):
        if not any(loop.body > other for _, other in inner):
            inner.append((turns(loop.own), loop.body))
    found: list[Step] = []
    place = 0
    while place < len(blocks):
        body = next((one for one in inner if place in one[1]), None)
        if body is None:
            multiplies = any("MMA" in it.base for it in blocks[place].code)
            found += [] if multiplies and not products else steps[starts[place] : starts[place + 1]]
            place += 1
            continue
        count, numbers = body
        for turn in range(count):
            for number in sorted(numbers):
                if not (_can_skip(number, blocks) and skips(blocks[number].code, turn)):
                    found += steps[starts[number] : starts[number + 1]]
        inner.remove(body)
        place = max(numbers) + 1 if min(numbers) == place else place + 1
    last = max((n for n, step in enumerate(found) if step.it.base == "EXIT"), default=len(found) - 1)
    return found[: last + 1]


def _can_skip(block: int, blocks: list[Block]) -> bool:
    """Whether a branch of the block in front can skip this one, which then goes on where that branch leads."""
    return block > 0 and set(blocks[block - 1].following) == {block, *blocks[block].following}


def _step(it: Instruction, word: int) -> Step:
    control = word >> 41

    def board(shift: int) -> int | None:
        number = control >> shift & 7
        return None if number == 7 else number

    return Step(it, control & 15, board(5), board(8), control >> 11 & 63)


def _pipe(it: Instruction) -> str:
    if it.base == "MUFU":
        return "mufu"
    if it.base in ("LDG", "LDGSTS", "STG", "LDS", "STS", "LDSM", "STSM", "SHFL", "ATOMG", "ATOM"):
        return "memory"
    return "alu" if it.base in _ALU else "fma"


def _busy(it: Instruction, pipe: str) -> float:
    """Cycles that an instruction keeps a pipe: memory moves 128 bytes a cycle for all four schedulers."""
    return max(4, it.width) if pipe == "memory" else _PIPES[pipe]


def cycles(
    traces: list[list[Step]], machine: Machine, *, warps: int, read_by: int = 1, far: Iterable[str] = ()
) -> tuple[list[float], dict[str, float]]:
    """Cycles from the start to the end of each block that an SM runs together, and how long each pipe is busy.

    `traces`: of each block. `warps`: those of a block on each scheduler. Copies of source lines in `far` come from the
    GPU's memory; `read_by` blocks read the same bytes, which come from there once.
    """
    distant = frozenset(far)
    held = [_Warp(block, trace) for block, trace in enumerate(traces) for _ in range(warps)]
    pipes = dict.fromkeys((*_PIPES, "tensor", "copies"), 0.0)
    busy = dict.fromkeys(pipes, 0.0)
    rate = min(machine.cache, machine.memory * read_by) / 4  # bytes a cycle of a scheduler's warps
    clock, ends = 0.0, [0.0] * len(traces)
    while left := [warp for warp in held if warp.at < len(warp.steps)]:
        clock, _, chosen = min(
            (max(clock, _issue(warp, machine, held, pipes)), warp.issued, n) for n, warp in enumerate(left)
        )
        warp = left[chosen]
        warp.issued = clock
        _run(warp, clock, machine, pipes, busy, rate, distant)
        warp.at += 1
        ends[warp.block] = max(ends[warp.block], clock, *warp.boards)
        clock += 1
    return ends, busy


def _issue(warp: _Warp, machine: Machine, held: list[_Warp], pipes: dict[str, float]) -> float:
    """When it can: operands are there, its pipe is free, and other warps of its block have come to the barrier."""
    step = warp.steps[warp.at]
    at = max([warp.ready, *(warp.boards[n] for n in range(6) if step.waits >> n & 1)])
    it = step.it
    if it.base == "DEPBAR" and it.operands.startswith("SB0"):
        left = int(it.operands.split(",")[1], 16)  # 0 stands behind a loop: the last copies read nothing
        at = max([at, *warp.groups[:-left]]) if left else at
    elif it.opcode.startswith("WARPGROUP.DEPBAR"):
        at = max(at, warp.product + machine.product)
    elif it.base == "HGMMA":
        pass  # queued
    elif it.base not in ("BRA", "EXIT"):
        at = max(at, pipes[_pipe(it)])
    if it.base == "BAR" and any(one.block == warp.block and one.at < warp.at for one in held):
        return float("inf")
    return at


def _run(
    warp: _Warp, clock: float, machine: Machine, pipes: dict[str, float], busy: dict[str, float],
    rate: float, distant: frozenset[str],
) -> None:  # fmt: skip
    step = warp.steps[warp.at]
    it = step.it
    warp.ready = clock + max(1, step.stall)
    latency = 0.0
    if it.base == "HGMMA":
        (columns,) = map(int, _COLUMNS.findall(it.opcode))
        pipes["tensor"] = max(pipes["tensor"], clock) + columns / 2
        busy["tensor"] += columns / 2
        warp.product = pipes["tensor"]
    else:
        pipe = _pipe(it)
        pipes[pipe] = max(pipes[pipe], clock) + _busy(it, pipe)
        busy[pipe] += _busy(it, pipe)
    if it.base == "LDGSTS" and not step.moves:
        latency = 20
    elif it.base == "LDGSTS":
        pipes["copies"] = max(pipes["copies"], clock) + it.width * 32 / rate
        busy["copies"] += it.width * 32 / rate
        near = machine.from_memory if it.line in distant else machine.from_cache
        warp.group = max(warp.group, clock + near, pipes["copies"] + machine.from_cache)
        latency = 20
    elif it.base == "LDGDEPBAR":
        warp.groups.append(warp.group)
        warp.group = 0.0
    elif it.base == "LDG":
        pipes["copies"] = max(pipes["copies"], clock) + it.width * 32 / machine.cache * 4
        busy["copies"] += it.width * 32 / machine.cache * 4
        latency = max(machine.from_cache, pipes["copies"] - clock)
    elif it.base in ("ATOMG", "ATOM"):
        latency = machine.atomic
    elif it.base in ("MEMBAR", "ERRBAR"):
        warp.ready = clock + (machine.fence if "GPU" in it.opcode or "SYS" in it.opcode else 20)
    elif it.base in ("LDS", "LDSM"):
        latency = machine.shared
    elif it.base == "SHFL":
        latency = machine.shuffle
    elif it.base == "MUFU":
        latency = machine.exponent
    elif it.base == "BAR":
        warp.ready = clock + machine.barrier
    elif step.sets is not None:
        latency = machine.exponent
    if step.sets is not None:
        warp.boards[step.sets] = max(warp.boards[step.sets], clock + latency)
    if step.read is not None:
        warp.boards[step.read] = max(warp.boards[step.read], clock + 20)
