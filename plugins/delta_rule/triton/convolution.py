"""The convolution in front of the gated delta rule, over trees and chunks, and the inputs that it keeps.

Triton compiles this file's functions; mypy does not know their types.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton.language as tl

from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels


@dependent_kernel(do_not_specialize=["rows"])
def convolution_kernel(
    x, weight, bias, states, slots, words, starts, out, rows,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Grid (⌈C / BLOCK⌉, rows, B), one program a row. rows = T, of chunks at least the longest; PADDED ≥ T.

    words [B, T, ⌈T/32⌉] int32 as of the tree kernel; with `starts` a row follows the one before.
    """
    wait_for_prior_kernels()
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    known = channel < CHANNELS
    if starts is None:
        first = request * rows
        column = tl.arange(0, PADDED)
        bits = tl.load(words + (first + row) * tl.cdiv(rows, 32) + column // 32, mask=column < rows, other=0)
        seen = ((bits >> (column % 32)) & 1) != 0
    else:
        first = tl.load(starts + request)
        known = known & (first + row < tl.load(starts + request + 1))
    slot = tl.load(slots + request)
    total = tl.zeros([BLOCK], tl.float32)
    at = row  # below 0 rows are the last inputs of the state
    for back in tl.static_range(TAPS):
        new = tl.load(x + (first + at) * CHANNELS + channel, mask=known & (at >= 0), other=0.0)
        of_state = (slot * CHANNELS + channel) * (TAPS - 1) + TAPS - 1 + at
        old = tl.load(states + of_state, mask=known & (at < 0), other=0.0)
        taken = tl.where(at >= 0, new.to(tl.float32), old.to(new.dtype).to(tl.float32))
        total += taken * tl.load(weight + channel * TAPS + TAPS - 1 - back, mask=known, other=0.0).to(tl.float32)
        if starts is None:
            at = tl.where(at >= 0, tl.max(tl.where(seen & (column < at), column, -1), 0), at - 1)
        else:
            at = at - 1
    if bias is not None:
        total += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    result = total / (1.0 + tl.exp(-total)) if SILU else total
    tl.store(out + (first + row) * CHANNELS + channel, result.to(out.dtype.element_ty), mask=known)


@dependent_kernel(do_not_specialize=["width", "pool", "layer_stride", "request_stride"])
def keep_inputs_kernel(
    x, states, slots, path, count, width, pool, layer_stride, request_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (⌈C / BLOCK⌉, B, L). width = G, pool = P, TAPS = W; x is strided by layer and request."""
    wait_for_prior_kernels()
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request, layer = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + request)
    length = tl.load(count + request)
    known = channel < tl.where(slot > 0, CHANNELS, 0)
    of_slot = states + ((layer * pool + slot) * CHANNELS + channel) * (TAPS - 1)
    of_request = x + layer * layer_stride + request * request_stride + channel
    for place in tl.static_range(TAPS - 1):  # from the first on: a place takes what is stored in a later one
        source = length + place
        old = tl.load(of_slot + source, mask=known & (source < TAPS - 1), other=0.0)
        row = tl.load(path + request * width + source - (TAPS - 1), mask=source >= TAPS - 1, other=0)
        new = tl.load(of_request + row * CHANNELS, mask=known & (source >= TAPS - 1), other=0.0)
        tl.store(of_slot + place, tl.where(source < TAPS - 1, old, new.to(old.dtype)), mask=known)
