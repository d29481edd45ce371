"""y = x Wᵀ + b by tiles of one shape: a row's sums never depend on how many rows there are or where in a tile it is.

    program (m, n)    rows m·BLOCK_M ..  x  outputs n·BLOCK_N ..
                      sums = 0;  for each BLOCK_K inputs, first to last:  sums += x · Wᵀ   (fp32, in registers)

No split over the inputs, no atomics, no other tile for few rows: rows past the last are masked, and load nothing. Row
tiles of one weight tile run side by side, so that W is read from memory once and by the others through the L2 cache.

WIDEN is for the interpreter, whose products of bf16 and FP8 are wrong. Triton compiles this file's function; mypy does
not know its types.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton.language as tl

from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels


@dependent_kernel(do_not_specialize=["rows"])
def linear_kernel(
    x, weight, bias, x_scale, weight_scale, out, rows,
    IN: tl.constexpr, OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid (⌈R / BLOCK_M⌉, ⌈OUT / BLOCK_N⌉); x [R, IN], weight [OUT, IN], out [R, OUT]."""
    wait_for_prior_kernels()
    TYPE: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    real, written = row < rows, column < OUT
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, IN, BLOCK_K, num_stages=STAGES):
        known = start + lane < IN
        a = tl.load(x + row[:, None] * IN + start + lane[None, :], mask=real[:, None] & known[None, :], other=0.0)
        b = tl.load(
            weight + column[:, None] * IN + start + lane[None, :], mask=written[:, None] & known[None, :], other=0.0
        )
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        # "ieee" is for fp32: TF32 keeps 10 bits. Hopper adds FP8 products in 14 bits: for BLOCK_K inputs at most.
        sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee", max_num_imprecise_acc=BLOCK_K)
    if x_scale is not None:
        sums = (sums * (tl.load(x_scale) * tl.load(weight_scale))).to(TYPE).to(tl.float32)
    if bias is not None:
        sums += tl.load(bias + column, mask=written, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * OUT + column[None, :], sums.to(TYPE), mask=real[:, None] & written[None, :])
