"""The kernels of gated attention and of gated delta nets, which follow the rules of
`layer_ops/triton/kernel.py`.

Columns of a joint product, by heads (G = Hv / Hk value heads have one key head):

    usual       q of all heads, k, v, z     b of all heads, a
    grouped     q, k, G v, G z of each key head     G b, G a of each key head

Triton compiles this file's functions; mypy does not know their types.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels
from d2sd.plugins.shared.kernels import in_fp8_range


@triton.jit
def _sigmoid(x, INTERPRET: tl.constexpr):
    return tl.div_rn(1.0, 1.0 + (tl.exp(-x) if INTERPRET else libdevice.exp(-x)))


@triton.jit
def _log_of_more(x, INTERPRET: tl.constexpr):
    """log(1 + e^x) of x ≤ 0; what 1 + e^x loses by rounding is multiplied back."""
    small = tl.exp(x) if INTERPRET else libdevice.exp(x)
    more = 1.0 + small
    log = tl.log(more) if INTERPRET else libdevice.log(more)
    return tl.where(more == 1.0, small, log * tl.div_rn(small, more - 1.0))


@triton.jit
def _part(product, at, mask, scales, part: tl.constexpr, TYPE: tl.constexpr):
    """A part of a product in fp32: as it is, or sums of FP8 values, scaled and rounded."""
    x = tl.load(product + at, mask=mask, other=0.0).to(tl.float32)
    if scales is not None:
        x = (x * tl.load(scales + part)).to(TYPE).to(tl.float32)
    return x


@dependent_kernel
def gate_heads_kernel(
    x, product, bias, scales, out, scale, stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid (R, ⌈Hq / BLOCK⌉). SIZE = D, LANES ≥ D a power of two; `stride` is from row to row of the product."""
    wait_for_prior_kernels()
    TYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head, lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, LANES)
    mask = (head < HEADS)[:, None] & (lane < SIZE)[None, :]
    column = (2 * head + 1)[:, None] * SIZE + lane[None, :]
    gate = _part(product, row * stride + column, mask, scales, 0, TYPE)
    if bias is not None:
        gate = (gate + tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)).to(TYPE).to(tl.float32)
    at = row * (HEADS * SIZE) + head[:, None] * SIZE + lane[None, :]
    open_by = _sigmoid(gate, INTERPRET).to(TYPE).to(tl.float32)
    result = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * open_by).to(TYPE)
    if scale is not None:
        result = in_fp8_range(result, tl.load(scale))
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@dependent_kernel
def gated_norm_kernel(
    x, product, weight, scales, out, scale, stride,
    EPS: tl.constexpr, HV: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, FIRST: tl.constexpr,
    APART: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid (R, ⌈Hv / BLOCK⌉). SIZE = Dv, LANES ≥ Dv a power of two; `stride` is from row to row of the product.

    FIRST is the column of the first gate; those of GROUP heads are side by side, and APART columns from the next ones.
    """
    wait_for_prior_kernels()
    TYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head, lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, LANES)
    mask = (head < HV)[:, None] & (lane < SIZE)[None, :]
    at = row * (HV * SIZE) + head[:, None] * SIZE + lane[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(value * value, 1) * (1.0 / SIZE)
    normed = (value * tl.rsqrt(mean + EPS)[:, None]).to(TYPE).to(tl.float32)
    factor = tl.load(weight + lane, mask=lane < SIZE, other=0.0).to(tl.float32)
    normed = (factor[None, :] * normed).to(TYPE).to(tl.float32)
    first = FIRST + head // GROUP * APART + head % GROUP * SIZE
    gate = _part(product, row * stride + first[:, None] + lane[None, :], mask, scales, 1, TYPE)
    result = (normed * (gate * _sigmoid(gate, INTERPRET))).to(TYPE)
    if scale is not None:
        result = in_fp8_range(result, tl.load(scale))
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@dependent_kernel(do_not_specialize=["rows"])
def delta_inputs_kernel(
    product, gates, weight, decay, bias, scales, states, slots, words, starts, q, k, v, g, beta, inputs,
    rows, product_stride, gates_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TAPS: tl.constexpr, GROUPED: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr, PADDED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid (rows, ⌈(2·Hk + Hv) / BLOCK⌉, B): one program BLOCK heads of a row. rows = T, or the longest chunk.

    LANES ≥ Dk, Dv and PADDED ≥ T are powers of two. words [B, T, ⌈T/32⌉] int32 of a tree; with `starts` [B + 1] a row
    follows the one before. Strides are from row to row.
    """
    wait_for_prior_kernels()
    TYPE: tl.constexpr = q.dtype.element_ty
    CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    GROUP: tl.constexpr = HV // HK
    WIDE: tl.constexpr = 2 * DK + 2 * GROUP * DV
    row, request = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head, lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, LANES)[None, :]
    own = head - 2 * HK  # of values
    is_q, is_k, is_v = head < HK, (head >= HK) & (own < 0), (own >= 0) & (own < HV)
    if starts is None:
        first = request * rows
        number = tl.arange(0, PADDED)
        bits = tl.load(words + (first + row) * tl.cdiv(rows, 32) + number // 32, mask=number < rows, other=0)
        seen = ((bits >> (number % 32)) & 1) != 0
        there = row < rows
    else:
        first = tl.load(starts + request)
        there = first + row < tl.load(starts + request + 1)
    is_v = is_v & there
    mask = (is_q | is_k | is_v)[:, None] & (lane < tl.where(own < 0, DK, DV)[:, None]) & there

    channel = tl.where(own < 0, head * DK, 2 * HK * DK + own * DV)[:, None] + lane
    column = channel
    if GROUPED:
        of_values = own // GROUP * WIDE + 2 * DK + own % GROUP * DV
        of_keys = head % HK * WIDE + tl.where(is_q, 0, DK)
        column = tl.where(own < 0, of_keys, of_values)[:, None] + lane
    slot = tl.load(slots + request)
    total = tl.zeros([BLOCK, LANES], tl.float32)
    at = row  # below 0 rows are the last inputs of the state
    for back in tl.static_range(TAPS):
        new = _part(product, (first + at) * product_stride + column, mask & (at >= 0), scales, 0, TYPE)
        if back == 0:
            tl.store(inputs + (first + row) * CHANNELS + channel, new.to(TYPE), mask=mask)
        of_state = (slot * CHANNELS + channel) * (TAPS - 1) + TAPS - 1 + at
        old = tl.load(states + of_state, mask=mask & (at < 0), other=0.0).to(TYPE).to(tl.float32)
        factor = tl.load(weight + channel * TAPS + TAPS - 1 - back, mask=mask, other=0.0).to(tl.float32)
        total += (new + old) * factor
        if starts is None:
            at = tl.where(at >= 0, tl.max(tl.where(seen & (number < at), number, -1), 0), at - 1)
        else:
            at = at - 1
    result = (total * _sigmoid(total, INTERPRET)).to(TYPE)
    to = first + row
    tl.store(q + to * (HK * DK) + channel, result, mask=mask & is_q[:, None])
    tl.store(k + to * (HK * DK) + channel - HK * DK, result, mask=mask & is_k[:, None])
    tl.store(v + to * (HV * DV) + channel - 2 * HK * DK, result, mask=mask & is_v[:, None])

    of_b = own
    of_a = HV + own
    if GROUPED:
        of_b = own // GROUP * (2 * GROUP) + own % GROUP
        of_a = of_b + GROUP
    written = _part(gates, to * gates_stride + of_b, is_v, scales, 2, TYPE)
    step = _part(gates, to * gates_stride + of_a, is_v, scales, 3, TYPE)
    step += tl.load(bias + own, mask=is_v, other=0.0).to(tl.float32)
    softplus = tl.maximum(step, 0.0) + _log_of_more(-tl.abs(step), INTERPRET)
    tl.store(g + to * HV + own, tl.load(decay + own, mask=is_v, other=0.0) * softplus, mask=is_v)
    tl.store(beta + to * HV + own, _sigmoid(written, INTERPRET).to(TYPE), mask=is_v)
