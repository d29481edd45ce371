"""Microseconds of the attention kernel on an H100 by arithmetic, over its machine code as it is served.

    python -m benchmarks.gpu.attention_time

Qwen3-8B's geometry, a layer. The tile and the splits are the launcher's. Blocks of one SM are played together
(`sm_time`); the first of them is the last split of its tile, which takes the new rows and merges. A kernel takes as
long as that SM, launch not included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
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
        shape = self.batch, self.rows, HEADS, SIZE, KV_HEADS, ITEM, CONTEXT + ROOM
        with patch.object(torch.cuda, "get_device_properties", lambda _: properties):
            return launch._splits(*shape, torch.device("cpu"), CAPABILITY, fp8=self.fp8, bounded=False)

    def tile(self) -> TileConfig:
        packed = self.rows * HEADS // KV_HEADS
        return select_tile(packed, SIZE, ITEM, CAPABILITY, fp8=self.fp8, splits=self.splits())

    def bytes(self) -> int:
        """K and V of the context."""
        return self.batch * CONTEXT * 2 * KV_HEADS * SIZE * (1 if self.fp8 else ITEM)

    def seconds(self) -> float:
        """The longest block of a busy SM, and of each further wave the longest of those that only read."""
        splits, tile = self.splits(), self.tile()
        row_tiles = math.ceil(self.rows * HEADS / KV_HEADS / tile.rows)
        blocks = math.ceil(row_tiles * KV_HEADS * self.batch * splits / H100.processors)
        together = min(blocks, resident(tile, SIZE, ITEM, CAPABILITY, fp8=self.fp8))
        turns = math.ceil(math.ceil(CONTEXT / tile.columns) / splits)
        merges = math.ceil(tile.rows / (32 if splits <= 8 else 16)) if splits > 1 else 0
        run = compile_kernel(
            kernel.cascade_attention_kernel, Attention("bf16", SIZE, self.rows, splits, self.fp8).launch, CAPABILITY
        )
        last = trace(run.cubin, turns, math.ceil(self.rows / tile.new), merges)
        others = [trace(run.cubin, turns, 0, 0)] * (together - 1)
        far = lines_of_context()
        ends, _ = cycles([last, *others], H100, warps=tile.warps // 4, read_by=row_tiles, far=far)
        waves = math.ceil(blocks / together)
        return (max(ends) + (waves - 1) * min(ends)) / H100.clock


def lines_of_context() -> set[str]:
    """Lines of the loop over the context, whose copies come from the GPU's memory."""
    path = Path(str(kernel.__file__))
    source = path.read_text("utf-8").splitlines()
    first = next(n for n, line in enumerate(source, 1) if "tl.range(begin, end" in line)
    last = next(n for n, line in enumerate(source, 1) if line.strip().startswith("# New rows"))
    return {f"{path.name}:{n}" for n in range(first, last)}


def trace(cubin: bytes, context: int, new: int, merges: int) -> list[Step]:
    """A warp with so many turns of the loops over the context, over new rows and over rows to merge; without rows to
    merge it ends where it announces its part, if it has one. Copies behind the last tile move nothing.
    """
    found, far = trace_of(cubin, turns_of(context, new, merges)), lines_of_context()
    ahead, once = (trace_of(cubin, turns_of(turns, turns, 0)) for turns in (0, 1))
    for distant, turns in ((True, context), (False, new)):
        places, before, after = (_copies(steps, far, distant=distant) for steps in (found, ahead, once))
        for place in places[turns * (len(after) - len(before)) :]:
            found[place] = replace(found[place], moves=False)
    ends = [place for place, step in enumerate(found) if step.it.base in ("ATOMG", "ATOM")]
    return found[: ends[0] + 1] if ends and not merges else found


def _copies(steps: list[Step], far: set[str], *, distant: bool) -> list[int]:
    """Places of the copies of the context, or of new rows."""
    return [n for n, step in enumerate(steps) if step.it.base == "LDGSTS" and (step.it.line in far) is distant]


def turns_of(context: int, new: int, merges: int) -> Callable[[tuple[Instruction, ...]], int]:
    far = lines_of_context()

    def turns(own: tuple[Instruction, ...]) -> int:
        if not any("MMA" in it.base for it in own):
            return merges
        return context if any(it.base == "LDGSTS" and it.line in far for it in own) else new

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
