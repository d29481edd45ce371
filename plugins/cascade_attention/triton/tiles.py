"""Tile sizes of the fused kernel by architecture, head size and type, and the splits of the context. No triton here.

`benchmarks/compile_kernels.py` compiles every line of the table for each architecture and holds shared memory and
registers to bounds. docs/kernel-times.md says what the choices cost. None has been timed: **not yet run** on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from d2sd.plugins.head_sizes import HEAD_STEP

#: Above this, the merge reads more than the splits save; the kernel's counter goes up to it.
MOST_SPLITS = 16
#: Least tokens of context in a split: reading fewer costs less than writing and merging a partial result.
LEAST_SHARE = 128
#: Most splits of a tile of 128 rows. With more, half the rows in twice the programs are done sooner, by counting: warps
#: of one block multiply at the same time, and take their exponentials at the same time.
MOST_TALL_SPLITS = 2
#: Of a thread, on every architecture.
MOST_REGISTERS = 255


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tile of one program, with its warps and pipeline stages."""

    rows: int  # query rows, heads of one K/V head packed: at least 16, the least that a tensor core takes
    columns: int  # tokens of the context, or new rows, an iteration: at most 64, two words of a mask
    warps: int
    stages: int  # K and V of so many iterations are in shared memory: one is multiplied, the others are on their way


def most_shared(capability: int) -> int:
    """Bytes of shared memory that a block may have on sm_`capability`; those of an SM are 1 KiB more."""
    if capability // 10 in (9, 10):
        return 227 * 1024
    return 163 * 1024 if capability in (0, 80, 87) else 99 * 1024


def padded(size: int) -> int:
    """Head size inside the kernel: a power of two. 96 becomes 128: a third more products, registers and shared memory
    than it needs; memory traffic stays that of 96, because masked lanes load nothing.
    """
    return max(HEAD_STEP, 1 << (size - 1).bit_length())


def select_tile(
    packed_rows: int, size: int, itemsize: int, capability: int, *, fp8: bool, bounded: bool = False, splits: int = 1
) -> TileConfig:
    """Tile for T·Hq/Hkv rows of head size D in a type of `itemsize` bytes (of q), over FP8 pages or others.

    `bounded`: rows see a window of the context. `capability` is 90 for sm_90; 0, of the interpreter, is as 80.

    | q, D padded            | rows           | columns | warps | reason                                               |
    |------------------------|----------------|---------|-------|------------------------------------------------------|
    | 16-bit, ≤ 64           | 16 to 64       | 64      | 4     | K + V are 16 KB a stage; fewer rescalings            |
    | 16-bit, 128            | 16 to 64       | 32      | 4     | K + V are 16 KB a stage: two blocks an SM on sm_80   |
    | with FP8 pages         | 16 to 64       | 32      | 4, 8  | 64 rows spill with 4 warps                           |
    | on sm_90, sm_100       | 16 to 64, 128  | 64      | 4, 8  | `wgmma` of 64 columns reads shared memory at its     |
    |                        |                |         |       | full rate; 112 KB with 64 rows: two blocks an SM     |
    | 16 rows, FP8 pages     | 16             | 32      | 4     | 64 columns spill                                     |
    | 16-bit, 256            | 16, 32         | 32      | 4     | 64 rows exceed the shared memory of sm_89, sm_120    |
    | with FP8 pages         | 16, 32         | 32      | 4, 8  | 32 rows spill with 4 warps                           |
    | on sm_80, 90, 100      | 16, 32, 64     | 32      | 4, 8  | 64 rows need the registers of 8 warps                |
    | with FP8 pages         | 16, 64         | 32      | 4, 8  | 32 rows spill                                        |
    | 16-bit, 512            | 16, 32         | 32      | 4, 8  | 64 rows exceed every shared memory, or spill         |
    | on sm_89, 120          | 16, 32         | 16      | 4, 8  | 96 KB of a block's 99                                |
    | fp32, ≤ 64             | 16             | 32      | 4     | no tensor cores under IEEE rounding: for proofs      |
    | fp32, more             | 16             | 16      | 4     | 32 columns spill at 128                              |

    Rows: the least of them that holds all, so that K and V are read once; more share them through L2. 64 rows are one
    warpgroup's tile on Hopper's and Blackwell's tensor cores, 128 those of two, which read K and V of the same stage;
    they are taken where the context is in at most `MOST_TALL_SPLITS` splits.

    Stages are 3: 2 tiles are on their way while one is multiplied. Fewer leave none, since Triton waits for a tile
    before it asks for the next.
    """
    wide, two_groups = padded(size), capability // 10 in (9, 10)
    if itemsize == 4:
        return TileConfig(rows=16, columns=32 if wide <= 64 else 16, warps=4, stages=3)
    heights = [16, 32, 64]
    if wide == 512:
        heights = [16, 32]
    elif wide == 256:
        heights = [16, 64] if two_groups and fp8 else [16, 32] if most_shared(capability) < 100 * 1024 else heights
    elif two_groups and splits <= MOST_TALL_SPLITS:
        heights.append(128)
    rows = next((rows for rows in heights if packed_rows <= rows), heights[-1])
    narrow = wide == 512 and most_shared(capability) < 100 * 1024
    columns = 16 if narrow else 64 if wide <= 64 or (wide == 128 and two_groups and not (fp8 and rows == 16)) else 32
    converts = fp8 and not two_groups  # by registers
    tall = rows == 128 or (rows == 64 and (wide == 256 or (wide == 128 and converts)))
    tall = tall or (rows == 32 and (wide == 512 or (wide == 256 and converts)))
    return TileConfig(rows, columns, warps=8 if tall else 4, stages=3)


def resident(tile: TileConfig, size: int, itemsize: int, capability: int, *, fp8: bool) -> int:
    """Blocks that an SM runs at the same time, by their shared memory; registers allow two of 4 warps."""
    return max(1, min(_fit_registers(tile), _fit_memory(tile, size, itemsize, capability, fp8=fp8)))


def register_limit(tile: TileConfig, size: int, itemsize: int, capability: int, *, fp8: bool) -> int | None:
    """Registers that a thread may have; None: ptxas chooses.

    It does not know what shared memory holds, and spills a few bytes for a third block: of heads of 256, and of few
    rows over FP8 pages. Elsewhere nothing spills.
    """
    held = _fit_memory(tile, size, itemsize, capability, fp8=fp8)
    spills = tile.rows <= 32 and (fp8 or padded(size) == 256)
    return MOST_REGISTERS if spills and held <= _fit_registers(tile) else None


def _fit_registers(tile: TileConfig) -> int:
    return 2 if tile.warps == 4 else 1


def _fit_memory(tile: TileConfig, size: int, itemsize: int, capability: int, *, fp8: bool) -> int:
    wide, pages = padded(size), 1 if fp8 else itemsize
    held = tile.rows * wide * itemsize + tile.stages * 2 * tile.columns * wide * pages
    held += 2 * tile.columns * wide * itemsize if fp8 else 0  # converted
    return (most_shared(capability) + 1024) // (held + 1024)


def choose_splits(programs: int, context_slots: int, places: int) -> int:
    """Number of parts to split the context into, a power of two (each number is a kernel of its own).

    `programs` is the grid without a split, B · Hkv · row tiles; `context_slots` is M·Z, the bucket, not the length,
    which is on the device; `places` is SMs · `resident`. The kernel divides the true length among the parts.
    """
    splits = min(MOST_SPLITS, places // programs, context_slots // LEAST_SHARE)
    return 1 << max(splits, 1).bit_length() - 1
