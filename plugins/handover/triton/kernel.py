"""The state of a step's rows, read before it and written after it: see `d2sd.plugins.handover`. Nothing here waits for
the device: a CUDA graph can capture it.

state: int64 [3, R]: anchor, context length, and whether the row is active; a step has B ≤ R rows. One program takes all
rows: a step's first kernel may read what its last one wrote in another row.
The launchers behind the kernels have the arguments of the specifications.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton.language as tl
from triton import next_power_of_2 as power

from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels

#: 32 requests of 16 tokens are 4 numbers a thread.
END_WARPS = 4

# Shape letters: B requests, R rows of the state, G block size γ, S stop tokens.


@dependent_kernel
def begin_kernel(
    anchor, context_len, active, late, source, state, new_anchor, new_context_len, new_active, size, rows,
    BP: tl.constexpr,
):  # fmt: skip
    """Grid (1). anchor, context_len, active, late, source and what is new of them: [B]; size: R; rows: B."""
    wait_for_prior_kernels()
    row = tl.arange(0, BP)
    inside = row < rows
    is_late = tl.load(late + row, mask=inside, other=0) != 0
    own = inside & (is_late == 0)
    at = state + tl.load(source + row, mask=inside & is_late, other=0)
    token = tl.where(is_late, tl.load(at, mask=is_late, other=0), tl.load(anchor + row, mask=own, other=0))
    length = tl.where(is_late, tl.load(at + size, mask=is_late, other=0), tl.load(context_len + row, mask=own, other=0))
    runs = tl.load(at + 2 * size, mask=is_late, other=0) != 0
    runs = tl.where(is_late, runs, tl.load(active + row, mask=own, other=0) != 0)
    tl.store(new_anchor + row, token, mask=inside)
    tl.store(new_context_len + row, length, mask=inside)
    tl.store(new_active + row, runs, mask=inside)


@dependent_kernel
def end_kernel(
    context_len, active, tokens, count, limit, stop, state, tokens_stride, count_stride, size, rows,
    BP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    """Grid (1). context_len, active, limit: [B]; tokens: [B, G], of which `count` are new; stop: [B, STOPS]."""
    wait_for_prior_kernels()
    row = tl.arange(0, BP)
    inside = row < rows
    g = tl.arange(0, GP)[None, :]
    new = tl.load(count + row * count_stride, mask=inside, other=1)
    length = tl.load(context_len + row, mask=inside, other=0) + new
    is_new = inside[:, None] & (g < G) & (g < new[:, None])
    token = tl.load(tokens + row[:, None] * tokens_stride + g, mask=is_new, other=-1)
    last = tl.sum(tl.where(g == new[:, None] - 1, token, 0), axis=1)
    ends = length >= tl.load(limit + row, mask=inside, other=0)
    for place in tl.static_range(STOPS):
        word = tl.load(stop + row * STOPS + place, mask=inside, other=-1)
        ends = ends | (tl.max((is_new & (token == word[:, None])).to(tl.int32), axis=1) > 0)
    runs = (tl.load(active + row, mask=inside, other=0) != 0) & (ends == 0)
    tl.store(state + row, tl.maximum(last, 0), mask=inside)  # below 0: one of `stop`, so the row has ended
    tl.store(state + size + row, length, mask=inside)
    tl.store(state + 2 * size + row, runs.to(tl.int64), mask=inside)


def begin(anchor, context_len, active, late, source, state):
    (rows,) = anchor.shape
    new_anchor, new_context_len = torch.empty(2, rows, dtype=torch.long, device=anchor.device).unbind(0)
    new_active = torch.empty(rows, dtype=torch.bool, device=anchor.device)
    inputs = (x.contiguous() for x in (anchor, context_len, active, late, source))
    with torch.cuda.device_of(anchor):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        begin_kernel[(1,)](
            *inputs, state, new_anchor, new_context_len, new_active, state.shape[1], rows, BP=power(rows), num_warps=1
        )
    return new_anchor, new_context_len, new_active


def end(context_len, active, tokens, count, limit, stop, state):
    rows, size = tokens.shape
    tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    inputs = context_len.contiguous(), active.contiguous(), tokens, count
    with torch.cuda.device_of(tokens):  # type: ignore[no-untyped-call]
        end_kernel[(1,)](
            *inputs, limit.contiguous(), stop.contiguous(), state, tokens.stride(0), count.stride(0), state.shape[1],
            rows, BP=power(rows), G=size, GP=power(size), STOPS=stop.shape[1], num_warps=END_WARPS,
        )  # fmt: skip
