"""y = x Wᵀ + b by tiles of one shape: a row's sums never depend on how many rows there are or where in a tile it is.

    program (m, n, s)    rows m·BLOCK_M ..  x  outputs n·BLOCK_N ..  over the s-th of SPLITS shares of the inputs
                         sums = 0;  for each BLOCK_K inputs, first to last:  sums += x · Wᵀ   (fp32, in registers)

No other tile for few rows: rows past the last are masked, and load nothing. Row tiles of one weight tile run side by
side, so that W is read from memory once and by the others through the L2 cache.

A product of few outputs has too few tiles to keep all multiprocessors reading, so `split_linear` divides the inputs:
each program stores its sums in `partial`, fp32, and the last to come of a tile adds them, of the first share to that
of the last, in whatever order they came. How many shares there are depends on W's shape alone. Exact products have one.

AHEAD bytes of each row of a program's weights are asked for before the wait for prior kernels, by a prefetch into L2:
memory reads them while the kernel before still runs. It changes no register, so it is safe even where that kernel
writes them; what the program computes with is loaded behind the wait.

WIDEN is for the interpreter, whose products of bf16 and FP8 are wrong. Triton compiles this file's function; mypy does
not know its types.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

from d2sd.plugins.shared.arrivals import comes_last
from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels
from d2sd.plugins.shared.prefetch import prefetch


@dependent_kernel(do_not_specialize=["rows"])
def linear_kernel(
    x, weight, bias, x_scale, weight_scale, out, partial, arrived, rows,
    IN: tl.constexpr, OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid (⌈R / BLOCK_M⌉, ⌈OUT / BLOCK_N⌉, SPLITS); x [R, IN], weight [OUT, IN], out [R, OUT]. Of several SPLITS,
    which divide IN by BLOCK_K: partial [SPLITS, R, OUT] fp32, arrived int32, one for each tile.
    """
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = 0, IN
    if SPLITS > 1:
        begin = tl.program_id(2) * (IN // SPLITS)
        end = begin + IN // SPLITS
    if AHEAD:
        prefetch(weight + column * IN + begin, AHEAD)
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_K)
    real, written = row < rows, column < OUT
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        known = start + lane < IN
        a = tl.load(x + row[:, None] * IN + start + lane[None, :], mask=real[:, None] & known[None, :], other=0.0)
        b = tl.load(
            weight + column[:, None] * IN + start + lane[None, :], mask=written[:, None] & known[None, :], other=0.0
        )
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        # "ieee" is for fp32: TF32 keeps 10 bits. Hopper adds FP8 products in 14 bits: for BLOCK_K inputs at most.
        sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee", max_num_imprecise_acc=BLOCK_K)
    at, inside = row[:, None] * OUT + column[None, :], real[:, None] & written[None, :]
    if SPLITS == 1:
        _finish(out, at, inside, sums, bias, column, written, x_scale, weight_scale)
    else:
        share = rows.to(tl.int64) * OUT
        tl.store(partial + tl.program_id(2) * share + at, sums, mask=inside)
        if comes_last(arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), SPLITS):
            sums = tl.load(partial + at, mask=inside, other=0.0)
            for split in range(1, SPLITS):
                sums += tl.load(partial + split * share + at, mask=inside, other=0.0)
            _finish(out, at, inside, sums, bias, column, written, x_scale, weight_scale)


@triton.jit
def _finish(out, at, inside, sums, bias, column, written, x_scale, weight_scale):
    """Scales, rounds, biases and stores the sums of a tile."""
    TYPE: tl.constexpr = out.dtype.element_ty
    if x_scale is not None:
        sums = (sums * (tl.load(x_scale) * tl.load(weight_scale))).to(TYPE).to(tl.float32)
    if bias is not None:
        sums += tl.load(bias + column, mask=written, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, sums.to(TYPE), mask=inside)
