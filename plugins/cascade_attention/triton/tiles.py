"""Tile sizes of the fused kernel by head size and type, and the splits of the context. Does not import triton.

`benchmarks/compile_kernels.py` compiles every line of the table for each architecture and holds shared memory and
registers to bounds. None has been timed: **not yet run** on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from d2sd.plugins.dispatch import HEAD_STEP

#: Above this, the merge reads more than the splits save.
MOST_SPLITS = 16
#: Least tokens of context in a split: reading fewer costs less than writing and merging a partial result.
LEAST_SHARE = 128


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tile of one program, with its warps and pipeline stages."""

    rows: int  # query rows, heads of one K/V head packed: at least 16, the least that a tensor core takes
    columns: int  # context tokens an iteration
    new: int  # new rows an iteration: a divisor of 32, the columns of a mask word
    warps: int
    stages: int  # iterations in flight, whose K and V are in shared memory


def padded(size: int) -> int:
    """Head size inside the kernel: a power of two. 96 becomes 128: a third more products, registers and shared memory
    than it needs; memory traffic stays that of 96, because masked lanes load nothing.
    """
    return max(HEAD_STEP, 1 << (size - 1).bit_length())


def select_tile(packed_rows: int, size: int, itemsize: int, *, fp8: bool, bounded: bool = False) -> TileConfig:
    """Tile for T·Hq/Hkv rows of head size D in a type of `itemsize` bytes (of q), over FP8 pages or others.

    `bounded`: rows see a window of the context.

    | q, D padded    | rows     | columns | new | warps | stages | reason                                              |
    |----------------|----------|---------|-----|-------|--------|-----------------------------------------------------|
    | 16-bit, ≤ 64   | 16 to 64 | 64      | 32  | 4     | 2      | K + V are 16 KB a stage; fewer rescalings           |
    | 16-bit, 128    | 16 to 64 | 32      | 32  | 4     | 2      | K + V are 16 KB a stage, 64 queries 16 KB: 48 KB    |
    | with FP8 pages | 16 to 64 | 32      | 32  | 4     | 1      | two stages spill on sm_89, sm_120 and take 56 KB    |
    | and a window   | 16, 32   | 32      | 32  | 4     | 1      | 64 rows spill on sm_89, sm_120, with 8 warps too    |
    | 16-bit, 256    | 16, 32   | 32      | 32  | 4     | 1      | 64 rows take 64 KB on sm_90                         |
    | with FP8 pages | 16, 32   | 16      | 32  | 4     | 1      | 32 columns take 64 KB                               |
    | fp32, ≤ 64     | 16       | 32      | 16  | 4     | 1      | no tensor cores under IEEE rounding: for proofs     |
    | fp32, more     | 16       | 16      | 16  | 4     | 1      | 32 columns spill at 128                             |

    Rows: the least of 16, 32, 64 that holds all, so that K and V are read once; more than 64 share them through L2.
    64 rows are one warpgroup's tile on Hopper's and Blackwell's tensor cores. Shared memory stays within 48 KB. Chunks
    of prompts may take more warps, `chunk_warps`.
    """
    wide = padded(size)
    if itemsize == 4:
        return TileConfig(rows=16, columns=32 if wide <= 64 else 16, new=16, warps=4, stages=1)
    most = 32 if wide == 256 or (wide == 128 and fp8 and bounded) else 64
    rows = next((rows for rows in (16, 32) if packed_rows <= rows), most)
    if wide == 256:
        return TileConfig(rows, columns=16 if fp8 else 32, new=32, warps=4, stages=1)
    if wide == 128:
        return TileConfig(rows, columns=32, new=32, warps=4, stages=1 if fp8 else 2)
    return TileConfig(rows, columns=64, new=32, warps=4, stages=2)


def chunk_warps(tile: TileConfig, size: int, capability: int, *, fp8: bool) -> int:
    """Warps of `tile` for chunks of prompts on sm_`capability`.

    Over FP8 pages 64 rows need eight where products are `mma.sync`: with four they run out of registers. `wgmma` takes
    four.
    """
    return 8 if fp8 and padded(size) == 128 and tile.rows == 64 and capability // 10 in (8, 12) else tile.warps


def choose_splits(programs: int, context_slots: int, processors: int) -> int:
    """Number of parts to split the context into, a power of two (each number is a kernel of its own).

    `programs` is the grid without a split, B · Hkv · row tiles; `context_slots` is M·Z, the bucket, not the length,
    which is on the device. The kernel divides the true length among the parts.
    """
    splits = min(MOST_SPLITS, processors // programs, context_slots // LEAST_SHARE)
    return 1 << max(splits, 1).bit_length() - 1
