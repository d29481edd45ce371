"""The kernels of this op folder: one pass over memory each, rounding where `reference.py` rounds.

Arithmetic is fp32; `.to(TYPE)` is a rounding of the model's type that the specification has too. The launcher turns
contraction to fused multiply-add off, because PyTorch's separate kernels round products. What is left to differ is the
order of the sums of squares.

INTERPRET: Triton's interpreter has no libdevice, whose `cos` and `exp` are those of PyTorch's kernels; Triton's own
are approximations. Triton compiles this file's functions; mypy does not know their types.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels
from d2sd.plugins.shared.kernels import in_fp8_range


@triton.jit
def _scaled(normed, factor, OFFSET: tl.constexpr, TYPE: tl.constexpr):
    """A norm in fp32 times `factor`, rounded before; with OFFSET times 1 + `factor`, rounded once."""
    if OFFSET:
        return (normed * (1.0 + factor.to(tl.float32))).to(TYPE)
    else:
        return (factor.to(tl.float32) * normed.to(TYPE).to(tl.float32)).to(TYPE)


@triton.jit
def _store_normed(
    value, factor, scale, out, mask,
    EPS: tl.constexpr, WIDTH: tl.constexpr, OFFSET: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """The norm of a row in fp32, 0 behind its last number, times `factor`; quantized if there is a scale."""
    mean = tl.sum(value * value, 0) * (1.0 / WIDTH)
    result = _scaled(value * tl.rsqrt(mean + EPS), factor, OFFSET, TYPE)
    if scale is not None:
        result = in_fp8_range(result, tl.load(scale))
    tl.store(out, result.to(out.dtype.element_ty), mask=mask)


@dependent_kernel
def add_rms_norm_kernel(
    x,
    branch,
    weight,
    total,
    out,
    scale,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    X_STRIDE: tl.constexpr,
    TOTAL_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Grid (rows of the result,): one program a row. WIDTH = E, PADDED ≥ E a power of two; strides are from row to row.

    BLOCK: rows of a block, the first of which is left out; 0: none is.
    """
    wait_for_prior_kernels()
    TYPE: tl.constexpr = x.dtype.element_ty
    number = tl.program_id(0)
    to, row = number.to(tl.int64), number.to(tl.int64)
    if BLOCK > 0:
        row += number // (BLOCK - 1) + 1
    lane = tl.arange(0, PADDED)
    mask = lane < WIDTH
    value = tl.load(x + row * X_STRIDE + lane, mask=mask, other=0.0).to(tl.float32)
    if branch is not None:
        added = tl.load(branch + row * WIDTH + lane, mask=mask, other=0.0).to(tl.float32)
        rounded = (value + added).to(TYPE)
        if total is not None:
            tl.store(total + row * TOTAL_STRIDE + lane, rounded, mask=mask)
        value = rounded.to(tl.float32)
    factor = tl.load(weight + lane, mask=mask, other=0.0)
    _store_normed(value, factor, scale, out + to * WIDTH + lane, mask, EPS, WIDTH, OFFSET, TYPE)


@triton.jit
def _half(qkv, at, mask, bias, bias_at, factor, TYPE: tl.constexpr):
    """Halves of some heads as the product leaves them: scaled, rounded, biased; in fp32."""
    x = tl.load(qkv + at, mask=mask, other=0.0).to(tl.float32)
    x = (x * factor[:, None]).to(TYPE).to(tl.float32)
    if bias is not None:
        x = (x + tl.load(bias + bias_at, mask=mask, other=0.0).to(tl.float32)).to(TYPE).to(tl.float32)
    return x


@triton.jit
def _weights(q_norm, k_norm, lane, q_mask, k_mask):
    """Norm weights of heads: those of queries, of keys, or 0."""
    weights = tl.load(k_norm + lane, mask=k_mask, other=0.0).to(tl.float32)
    if q_norm is not None:
        weights += tl.load(q_norm + lane, mask=q_mask, other=0.0).to(tl.float32)
    return weights


@triton.jit
def _paged(x, scale, TYPE: tl.constexpr):
    """x as FP8 pages give it back."""
    return (in_fp8_range(x, scale).to(tl.float8e4nv).to(tl.float32) * scale).to(TYPE)


@triton.jit
def _store_paged(pages, a, b, scale, layer, mask, apart):
    """Halves of some heads as `write_pages` stores them."""
    if scale is not None:
        a, b = in_fp8_range(a, tl.load(scale + layer)), in_fp8_range(b, tl.load(scale + layer))
    tl.store(pages, a.to(pages.dtype.element_ty), mask=mask)
    tl.store(pages + apart, b.to(pages.dtype.element_ty), mask=mask)


@dependent_kernel
def qk_norm_rope_kernel(
    qkv, cos, sin, q_norm, k_norm, bias, scales, k_scale, v_scale, q, k, v,
    k_pages, v_pages, page_table, positions, keep, in_stride, out_stride, paged, places, columns,
    EPS: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    ROTARY: tl.constexpr, GATED: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid (R, ⌈(Hq + 2·Hkv) / BLOCK⌉, L): one program BLOCK heads of a row. The first `paged` rows, `places` of each
    request, go to pages where there are any.

    HEAD = D/2, PADDED ≥ D/2 a power of two; strides are from layer to layer, of the product and of k and v. A lane has
    two numbers of a head, `apart` from each other: of the first ROTARY lanes those that rotate together. GATED: behind
    each query in the product is a gate, which is left there.
    """
    wait_for_prior_kernels()
    TYPE: tl.constexpr = k.dtype.element_ty
    HEADS: tl.constexpr = HQ + 2 * HKV
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_q, is_k, is_v = head < HQ, (head >= HQ) & (head < HQ + HKV), (head >= HQ + HKV) & (head < HEADS)
    lane = tl.arange(0, PADDED)
    in_half = (lane < HEAD)[None, :]
    mask = (head < HEADS)[:, None] & in_half
    q_mask, k_mask, v_mask = is_q[:, None] & in_half, is_k[:, None] & in_half, is_v[:, None] & in_half

    if ROTARY < HEAD:
        apart = tl.where(lane < ROTARY, ROTARY, HEAD - ROTARY)[None, :]
        near = tl.where(lane < ROTARY, lane, lane + ROTARY)[None, :]
    else:
        apart = HEAD
        near = lane[None, :]
    column = head[:, None] * (2 * HEAD) + near
    COLUMNS: tl.constexpr = (HEADS + HQ * GATED) * 2 * HEAD
    given = tl.where(is_q, 2 * head, head + HQ)[:, None] * (2 * HEAD) + near if GATED else column
    at = layer * in_stride + row * COLUMNS + given
    bias_at = layer * COLUMNS + given
    factor = tl.full([BLOCK], 1.0, tl.float32)
    if scales is not None:
        factor = tl.load(scales + layer * 3 + tl.where(is_q, 0, tl.where(is_k, 1, 2)))
    first = _half(qkv, at, mask, bias, bias_at, factor, TYPE)
    second = _half(qkv, at + apart, mask, bias, bias_at + apart, factor, TYPE)

    a, b = first, second
    if k_norm is not None:
        mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) * (0.5 / HEAD)
        root = tl.rsqrt(mean + EPS)[:, None]
        of_head = near + tl.zeros([BLOCK, 1], tl.int32)
        of_layer = k_norm + layer * (2 * HEAD)
        weights_a = _weights(q_norm, of_layer, of_head, q_mask, k_mask)
        weights_b = _weights(q_norm, of_layer, of_head + apart, q_mask, k_mask)
        a = _scaled(a * root, weights_a, OFFSET, TYPE).to(tl.float32)
        b = _scaled(b * root, weights_b, OFFSET, TYPE).to(tl.float32)

    c = tl.load(cos + row * ROTARY + lane, mask=lane < ROTARY, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * ROTARY + lane, mask=lane < ROTARY, other=0.0).to(tl.float32)[None, :]
    turned_a = ((a * c).to(TYPE).to(tl.float32) + (-b * s).to(TYPE).to(tl.float32)).to(TYPE)
    turned_b = ((b * c).to(TYPE).to(tl.float32) + (a * s).to(TYPE).to(tl.float32)).to(TYPE)
    if ROTARY < HEAD:
        turned_a = tl.where((lane < ROTARY)[None, :], turned_a, a.to(TYPE))
        turned_b = tl.where((lane < ROTARY)[None, :], turned_b, b.to(TYPE))

    if HQ > 0:
        to_q = row * (HQ * 2 * HEAD) + column
        tl.store(q + to_q, turned_a, mask=q_mask)
        tl.store(q + to_q + apart, turned_b, mask=q_mask)
    # A value that is not finite becomes 0 and its key NaN (`move_broken`): so keys read their values, too.
    beside = tl.where(k_mask, HKV * 2 * HEAD, 0)
    if scales is not None:
        factor = tl.where(is_k, tl.load(scales + layer * 3 + 2), factor)
    value_a = _half(qkv, at + beside, k_mask | v_mask, bias, bias_at + beside, factor, TYPE).to(TYPE)
    value_b = _half(qkv, at + beside + apart, k_mask | v_mask, bias, bias_at + beside + apart, factor, TYPE).to(TYPE)
    if k_scale is not None:
        key_scale, value_scale = tl.load(k_scale + layer), tl.load(v_scale + layer)
        turned_a, turned_b = _paged(turned_a, key_scale, TYPE), _paged(turned_b, key_scale, TYPE)
        value_a, value_b = _paged(value_a, value_scale, TYPE), _paged(value_b, value_scale, TYPE)
    wide_a, wide_b = value_a.to(tl.float32), value_b.to(tl.float32)
    finite = (tl.abs(wide_a) < float("inf")) & (tl.abs(wide_b) < float("inf"))  # false of NaN
    whole = (tl.min(finite.to(tl.int32), 1) != 0)[:, None]
    value_a, value_b = tl.where(whole, wide_a, 0.0).to(TYPE), tl.where(whole, wide_b, 0.0).to(TYPE)
    turned_a = tl.where(whole, turned_a.to(tl.float32), float("nan")).to(TYPE)
    turned_b = tl.where(whole, turned_b.to(tl.float32), float("nan")).to(TYPE)
    if k_pages is not None:
        to_pages = row < paged
        position = tl.load(positions + row, mask=to_pages, other=0).to(tl.int32)
        kept = to_pages & (tl.load(keep + row, mask=to_pages, other=0) != 0) & (position // PAGE < columns)
        page = tl.load(page_table + row // places * columns + position // PAGE, mask=kept, other=0).to(tl.int64)
        at = (page * PAGE + position % PAGE) * (HKV * 2 * HEAD) + column - HQ * 2 * HEAD
        _store_paged(k_pages + at, turned_a, turned_b, k_scale, layer, kept & k_mask, apart)
        _store_paged(v_pages + at - HKV * 2 * HEAD, value_a, value_b, v_scale, layer, kept & v_mask, apart)
        k_mask, v_mask = k_mask & (row >= paged), v_mask & (row >= paged)
    to_kv = layer * out_stride + row * (HKV * 2 * HEAD) + column - HQ * 2 * HEAD
    tl.store(k + to_kv, turned_a, mask=k_mask)
    tl.store(k + to_kv + apart, turned_b, mask=k_mask)
    to_kv -= HKV * 2 * HEAD
    tl.store(v + to_kv, value_a, mask=v_mask)
    tl.store(v + to_kv + apart, value_b, mask=v_mask)


@dependent_kernel
def silu_mul_kernel(
    gate_up, scales, out, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr, INTERPRET: tl.constexpr
):
    """Grid (R, ⌈I / BLOCK⌉). WIDTH = I."""
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < WIDTH
    at = gate_up + row * (2 * WIDTH) + lane
    gate, up = (
        tl.load(at, mask=mask, other=0.0).to(tl.float32),
        tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32),
    )
    if scales is not None:
        gate = (gate * tl.load(scales)).to(TYPE).to(tl.float32)
        up = (up * tl.load(scales + 1)).to(TYPE).to(tl.float32)
    faded = tl.exp(-gate) if INTERPRET else libdevice.exp(-gate)
    silu = tl.div_rn(gate, 1.0 + faded).to(TYPE).to(tl.float32)
    result = (silu * up).to(TYPE)
    if scale is not None:
        result = in_fp8_range(result, tl.load(scale))
    tl.store(out + row * WIDTH + lane, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _store_tables(
    position, frequencies, cos, sin, row,
    FACTOR: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Cosines and sines of a row at its position."""
    lane = tl.arange(0, PADDED)
    mask = lane < HEAD
    angle = position.to(tl.float32) * tl.load(frequencies + lane, mask=mask, other=0.0)
    if INTERPRET:
        c, s = tl.cos(angle), tl.sin(angle)
    else:
        c, s = libdevice.cos(angle), libdevice.sin(angle)
    at = row * HEAD + lane
    tl.store(cos + at, (c * FACTOR).to(cos.dtype.element_ty), mask=mask)
    tl.store(sin + at, (s * FACTOR).to(sin.dtype.element_ty), mask=mask)


@dependent_kernel
def rope_tables_kernel(
    positions,
    front,
    frequencies,
    cos,
    sin,
    rows,
    FACTOR: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (R,). HEAD = D/2. The first `rows` are those of `front`, if there is one."""
    wait_for_prior_kernels()
    row = tl.program_id(0).to(tl.int64)
    if front is None:
        position = tl.load(positions + row)
    else:
        position = tl.load(front + row, mask=row < rows, other=0)
        position += tl.load(positions + row - rows, mask=row >= rows, other=0)
    _store_tables(position, frequencies, cos, sin, row, FACTOR, HEAD, PADDED, INTERPRET)


@dependent_kernel
def embed_norm_rope_kernel(
    tokens, table, weight, start, steps, frequencies, front, front_weight, front_positions, x, out, cos, sin, scale,
    before, rows, stride,
    EPS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, OFFSET: tl.constexpr,
    FACTOR: tl.constexpr, HEAD: tl.constexpr, HALF: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Grid (C + R,): one program a row, the first `before` = C of `front`. `steps`: positions, or with `start` those of
    `rows` rows of each request, `stride` from one to the next.

    WIDTH = E, HEAD = D/2; PADDED ≥ E and HALF ≥ D/2 are powers of two.
    """
    wait_for_prior_kernels()
    TYPE: tl.constexpr = table.dtype.element_ty
    number = tl.program_id(0) - before
    row, own, is_own = tl.program_id(0).to(tl.int64), number.to(tl.int64), number >= 0
    token = tl.load(tokens + own, mask=is_own, other=0)
    if start is None:
        position = tl.load(steps + own, mask=is_own, other=0)
    else:
        position = tl.load(start + number // rows, mask=is_own, other=0)
        position += tl.load(steps + number // rows * stride + number % rows, mask=is_own, other=0)
    if front is not None:
        position += tl.load(front_positions + row, mask=own < 0, other=0)
    lane = tl.arange(0, PADDED)
    mask = lane < WIDTH
    value = tl.load(table + token * WIDTH + lane, mask=mask & is_own, other=0.0)
    factor = tl.load(weight + lane, mask=mask & is_own, other=0.0)
    tl.store(x + own * WIDTH + lane, value, mask=mask & is_own)
    if front is not None:
        value = tl.where(is_own, value, tl.load(front + row * WIDTH + lane, mask=mask & (own < 0), other=0.0))
        factor = tl.where(is_own, factor, tl.load(front_weight + lane, mask=mask & (own < 0), other=0.0))
    _store_normed(value.to(tl.float32), factor, scale, out + row * WIDTH + lane, mask, EPS, WIDTH, OFFSET, TYPE)
    _store_tables(position, frequencies, cos, sin, row, FACTOR, HEAD, HALF, INTERPRET)


@dependent_kernel
def quantize_kernel(x, scale, out, numbers, BLOCK: tl.constexpr):
    """Grid (⌈numbers / BLOCK⌉,)."""
    wait_for_prior_kernels()
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < numbers
    rounded = in_fp8_range(tl.load(x + lane, mask=mask, other=0.0), tl.load(scale))
    tl.store(out + lane, rounded.to(out.dtype.element_ty), mask=mask)
