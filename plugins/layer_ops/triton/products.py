"""Launches products: the batch-invariant one of any rows, and that of few rows. As launch.py does the others."""

# Triton has no types, and may be missing where a user's type checker follows these sources.
# mypy: disable-error-code="no-untyped-def,import-untyped,import-not-found"

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from d2sd.plugins.layer_ops.reference import SPLIT_STEP
from d2sd.plugins.layer_ops.triton.launch import INTERPRET, OPTIONS
from d2sd.plugins.layer_ops.triton.linear import linear_kernel


@dataclass(frozen=True, slots=True)
class LinearTile:
    """Tile of one program."""

    rows: int
    outputs: int
    inputs: int  # an iteration
    stages: int
    splits: int = 1
    ahead: int = 0  # bytes of a row of W that are asked for before the wait
    warps: int = 4


#: By bytes of a weight, for few and for many outputs. 64 rows of 16 bits and FP8 are a warpgroup's tile on Hopper.
#: An iteration takes 128 bytes of a row. Of x a program reads as much as of W for 64 outputs, twice as much for 32, but
#: 32 give 128 programs to 4,096 outputs. Weights in flight are those of all stages but one: 24 and 32 KB, of which
#: Little's law asks 20 KB a multiprocessor on H100. fp32 has no tensor cores under IEEE rounding.
NARROW = {1: LinearTile(64, 32, 128, 7), 2: LinearTile(64, 32, 64, 7), 4: LinearTile(16, 32, 32, 7)}
WIDE = {1: LinearTile(64, 64, 128, 5), 2: LinearTile(64, 64, 64, 5), 4: LinearTile(16, 32, 32, 7)}
#: From so many outputs on, 64 of them a program keep all multiprocessors busy.
MANY_OUTPUTS = 8192


def linear_tile(outputs: int, itemsize: int) -> LinearTile:
    """By the weight alone, so that a row's sums are the same among any number of rows."""
    return (WIDE if outputs >= MANY_OUTPUTS else NARROW)[itemsize]


#: By bytes of a weight, at up to 64 rows: a program reads half as much of x as of W, and has 48 KB of weights in
#: flight. Before the wait it asks for 64 KB, on an H100 what memory reads while the small kernel before runs.
FEW = {1: LinearTile(64, SPLIT_STEP, SPLIT_STEP, 4, ahead=512), 2: LinearTile(64, SPLIT_STEP, 64, 4, ahead=512)}
#: Programs that keep all multiprocessors reading, most shares of the inputs, and fewest iterations of one.
_PROGRAMS, _SPLITS, _LEAST = 128, 8, 4


@cache
def split_tile(outputs: int, inputs: int, itemsize: int) -> LinearTile:
    """By the weight alone, as `linear_tile`."""
    tile = FEW[itemsize]
    splits, tiles, turns = 1, outputs // tile.outputs, inputs // tile.inputs
    while splits < _SPLITS and tiles * splits < _PROGRAMS and turns % (2 * splits) == 0:
        if turns < 2 * splits * _LEAST:
            break
        splits *= 2
    return replace(tile, splits=splits, ahead=min(tile.ahead, inputs * itemsize // splits))


def split_linear(x, weight, scales=None, dtype=None, arrived=None):
    assert all(size % SPLIT_STEP == 0 for size in weight.shape)
    return _linear(x, weight, None, scales, dtype, split_tile(*weight.shape, weight.element_size()), arrived)


def linear(x, weight, bias=None, scales=None, dtype=None):
    return _linear(x, weight, bias, scales, dtype, linear_tile(len(weight), weight.element_size()))


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype | None,
    tile: LinearTile,
    arrived: Tensor | None = None,
) -> Tensor:
    assert weight.is_contiguous()
    assert x.dtype == weight.dtype
    rows = x.flatten(0, -2).contiguous()
    out = torch.empty(len(rows), len(weight), dtype=dtype or x.dtype, device=x.device)
    grid = triton.cdiv(len(rows), tile.rows), triton.cdiv(len(weight), tile.outputs), tile.splits
    partial = None
    if tile.splits > 1:
        partial = torch.empty(tile.splits, *out.shape, dtype=torch.float32, device=x.device)
        if arrived is None or len(arrived) < grid[0] * grid[1]:
            arrived = torch.zeros(grid[0] * grid[1], dtype=torch.int32, device=x.device)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # the head runs outside of the layers
        linear_kernel[grid](
            rows,
            weight,
            bias,
            *(scales or (None, None)),
            out,
            partial,
            None if partial is None else arrived,
            len(rows),
            **linear_constants(tile, *weight.shape),
            num_warps=tile.warps,
            **OPTIONS,
        )
    return out.view(*x.shape[:-1], -1)


@cache
def linear_constants(tile: LinearTile, outputs: int, inputs: int) -> dict[str, Any]:
    """Compile-time constants of `linear_kernel`."""
    return {
        "IN": inputs,
        "OUT": outputs,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.inputs,
        "STAGES": tile.stages,
        "SPLITS": tile.splits,
        "AHEAD": tile.ahead,
        "WIDEN": INTERPRET,
    }
