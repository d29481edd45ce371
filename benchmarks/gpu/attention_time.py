"""Microseconds of the attention kernel on an H100 by arithmetic, over its machine code as it is served.

    python -m benchmarks.gpu.attention_time

Qwen3-8B's geometry, a layer. The tile and the splits are the launcher's. Blocks of one SM are played together
(`sm_time`); the first of them is the last of its tile to come. A kernel takes as long as that SM, launch not included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

from benchmarks.ahead_of_time import compile_kernel
from benchmarks.gpu.sm_time import H100, Step, cycles, trace_of
from benchmarks.sass import Instruction
from d2sd.plugins.cascade_attention.triton import kernel, launch
from d2sd.plugins.cascade_attention.triton.tiles import TileConfig, resident, select_tile
from tests.plugins.cascade_attention.cases import Attention

HEADS, KV_HEADS, SIZE, ITEM, CAPABILITY = 32, 8, 128, 2, 90
#: Cycles of a reading of the counter: its latency, and that of handing it to all threads.
POLL = H100.from_cache + 60
#: Tiles that are copied ahead.
AHEAD = 2
#: Tokens of context, and of pages behind them.
CONTEXT, ROOM = 2048, 32


@dataclass(frozen=True)
class Case:
    """A pass over `batch` requests of `rows` rows each, behind CONTEXT tokens."""

    batch: int
    rows: int
    fp8: bool = False  # pages

    def splits(self) -> int:
        """The number that the launcher chooses."""
        properties = SimpleNamespace(multi_processor_count=H100.processors)
        shape = launch.Shape(self.rows, HEADS, KV_HEADS, SIZE, ITEM, CAPABILITY, self.fp8, bounded=False)
        with patch.object(torch.cuda, "get_device_properties", lambda _: properties):
            return launch._splits(shape, self.batch, CONTEXT + ROOM, torch.device("cpu"))

    def tile(self) -> TileConfig:
        packed = self.rows * HEADS // KV_HEADS
        return select_tile(packed, SIZE, ITEM, CAPABILITY, fp8=self.fp8, splits=self.splits())

    def bytes(self) -> int:
        """K and V of the context."""
        return self.batch * CONTEXT * 2 * KV_HEADS * SIZE * (1 if self.fp8 else ITEM)

    def seconds(self) -> float:
        """The longest block of a busy SM, and of each further wave the longest of those that only read.

        Longest is a block with the most tiles, or the one whose tiles include new rows. It is the last to come of its
        tile; the others of its SM wait as long, and each merges its share.
        """
        splits, tile = self.splits(), self.tile()
        row_tiles = math.ceil(self.rows * HEADS / KV_HEADS / tile.rows)
        blocks = math.ceil(row_tiles * KV_HEADS * self.batch * splits / H100.processors)
        together = min(blocks, resident(tile, SIZE, ITEM, CAPABILITY, fp8=self.fp8))
        run = compile_kernel(
            kernel.cascade_attention_kernel, Attention("bf16", SIZE, self.rows, splits, self.fp8).launch, CAPABILITY
        )
        context, new = math.ceil(CONTEXT / tile.columns), math.ceil(self.rows / tile.columns)
        most, least = math.ceil((context + new) / splits), (context + new) // splits
        kinds = [(most, 0), (least - new, new)] if splits > 1 else [(context, new)]

        def ends(*traces: list[Step]) -> list[float]:
            """When each block of an SM is done."""
            far = lines_of_context()
            return cycles(list(traces), H100, warps=tile.warps // 4, read_by=row_tiles, far=far)[0]

        def end(turns: tuple[int, int]) -> float:
            others = together - 1
            if splits == 1:
                return max(ends(trace(run.cubin, *turns), *[trace(run.cubin, context, 0)] * others))
            announced = ends(trace(run.cubin, *turns), *[trace(run.cubin, least, 0)] * others)
            polls = [1 + math.ceil(max(0, announced[0] - at) / POLL) for at in announced]
            given = [turns, *[(least, 0)] * others]
            return max(ends(*(trace(run.cubin, *one, waits, 1) for one, waits in zip(given, polls, strict=True))))

        waves = math.ceil(blocks / together)
        plain = min(ends(*[trace(run.cubin, least, 0)] * together)) if waves > 1 else 0
        return (max(map(end, kinds)) + (waves - 1) * plain) / H100.clock


def lines_of_context() -> set[str]:
    """Lines of the loop over the context and the new rows, whose copies come from the GPU's memory: those of new rows
    do not, and are taken to.
    """
    return lines_between("tl.range(begin, end", "return")


def lines_between(start: str, end: str) -> set[str]:
    """Lines of the kernel from that with `start` up to the next that begins with `end`."""
    path = Path(str(kernel.__file__))
    source = path.read_text("utf-8").splitlines()
    first = next(n for n, line in enumerate(source, 1) if start in line)
    last = next(n for n, line in enumerate(source, 1) if n > first and line.strip().startswith(end))
    return {f"{path.name}:{n}" for n in range(first, last)}


def trace(cubin: bytes, context: int, new: int, polls: int = 0, merges: int = 0) -> list[Step]:
    """A warp with so many turns over the context, over new rows, of waiting for other parts and over shares to merge;
    without any to merge it ends where it announces its part, if it has one. Copies behind the last tile move nothing.

    Both kinds of tiles are turns of one loop, but for FP8 pages. No block of a tile leaves before the last comes.
    """
    far = lines_of_context()

    def steps_of(context: int, new: int) -> tuple[list[Step], list[int]]:
        """And the places of their copies."""
        turns = turns_of(context, new, polls, merges, apart=converts(cubin))
        skips = skips_of(0 if converts(cubin) else context, context + new)
        steps = trace_of(cubin, turns, skips=skips)
        return steps, [n for n, step in enumerate(steps) if step.it.base == "LDGSTS" and step.it.line in far]

    found, places = steps_of(context, new)
    none = len(steps_of(0, 0)[1])  # those in front of the loops
    pages, rows = (len(steps_of(*turns)[1]) - none for turns in ((1, 0), (0, 1)))  # of a turn
    idle, end = places[(context + new) * pages :], (context + AHEAD) * pages
    if converts(cubin):
        idle = places[context * pages : end] + places[end + new * rows :]
    for place in idle:
        found[place] = replace(found[place], moves=False)
    left = lines_between("if left != 0", "shares =") | lines_between("if (word >> 28) != 0", "return")
    found = [step for step in found if step.it.line not in left]
    ends = [place for place, step in enumerate(found) if step.it.base in ("ATOMG", "ATOM")]
    return found[: ends[0] + 1] if ends and not merges else found


def skips_of(context: int, turns: int) -> Callable[[tuple[Instruction, ...], int], bool]:
    """Branches of the loop: ids of pages are read two tiles ahead of copies, scores are masked in tiles of new rows."""
    ids = lines_between("def _page_ids(", "@")

    def skips(code: tuple[Instruction, ...], turn: int) -> bool:
        return turn >= turns - 2 * AHEAD if any(it.line in ids for it in code) else turn < context

    return skips


@cache
def converts(cubin: bytes) -> bool:
    """Whether it reads FP8 pages: a loop over them, and one over new rows."""
    return any("E4M3" in step.it.opcode for step in trace_of(cubin, lambda _: 1))


def turns_of(
    context: int, new: int, polls: int, merges: int, *, apart: bool
) -> Callable[[tuple[Instruction, ...]], int]:
    waiting = lines_between("while", "if")

    def turns(own: tuple[Instruction, ...]) -> int:
        if any("MMA" in it.base for it in own):
            of_pages = any("E4M3" in it.opcode for it in own)
            return context + new if not apart else context if of_pages else new
        return polls if any(it.line in waiting for it in own) else merges

    return turns


#: What docs/kernel-times.md lists.
CASES = (Case(1, 1), Case(8, 1), Case(32, 1), Case(1, 16), Case(1, 64), Case(1, 64, fp8=True), Case(8, 64))


def line(case: Case) -> str:
    """A row of the table in docs/kernel-times.md."""
    tile, least = case.tile(), case.bytes() / (H100.memory * H100.processors * H100.clock)
    pages = "FP8" if case.fp8 else "bf16"
    shape = f"{tile.rows} × {tile.columns}, {tile.stages} stages"
    times = f"{1e6 * case.seconds():.1f} | {1e6 * least:.1f}"
    return f"| {case.batch} | {case.rows} | {pages} | {shape} | {case.splits()} | {times} |"


if __name__ == "__main__":
    for one in CASES:
        print(line(one), flush=True)
