"""The state of a step's rows, read before it and written after it, and the rows that it commits, in one launch: see
`d2sd.plugins.handover`. Nothing here waits for the device: a CUDA graph can capture it.

state: int64 [3, R]: anchor, context length, and whether the row is active; a step has B ≤ R rows. One program takes all
rows: a step's first kernel may read what its last one wrote in another row. What receives committed rows has those of
one request side by side.
The launchers behind the kernels have the arguments of the specifications.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import next_power_of_2 as power

from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels

#: 32 requests of 16 tokens are 4 numbers a thread.
END_WARPS = 4
#: Numbers of a program that commits, and its warps: 16 numbers a thread.
BLOCK, WARPS = 2048, 4

# Shape letters: B requests, R rows of the state, G block size γ, S stop tokens, N nodes, F features of a node, M pages
# a request, G' ≥ G rows of a request in what is new.


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


@dependent_kernel
def commit_kernel(
    path, count, active, context_len, features, page_table, windowed_table,
    new_features, positions, keep, new_table, new_windowed,
    count_stride, features_stride, rows, nodes, columns,
    G: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B, G', ⌈F / BLOCK⌉ or 1). `features_stride`: numbers from one request to the next of what is new of them;
    rows = G', WIDTH = F.
    """
    wait_for_prior_kernels()
    request, g, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    lane = tl.arange(0, BLOCK)
    if part == 0:
        new = (g < tl.load(count + request * count_stride)) & (tl.load(active + request) != 0)
        tl.store(keep + request * rows + g, new & (g < G))
        if g < G:
            tl.store(positions + request * rows + g, tl.load(context_len + request) + g)
    if WIDTH > 0:
        node = tl.load(path + request * G + g, mask=g < G, other=0)
        column = part * BLOCK + lane
        inside = (column < WIDTH) & (g < G)
        row = tl.load(features + (request * nodes + node) * WIDTH + column, mask=inside)
        tl.store(new_features + request * features_stride + g * WIDTH + column, row, mask=inside)
    if new_table is not None:  # noqa: SIM102  # what is known when it is compiled, then what is not
        if (part == 0) & (g == 0):
            for start in range(0, columns, BLOCK):
                at = request * columns + start + lane
                inside = start + lane < columns
                tl.store(new_table + at, tl.load(page_table + at, mask=inside), mask=inside)
                if windowed_table is not None:
                    tl.store(new_windowed + at, tl.load(windowed_table + at, mask=inside), mask=inside)


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


def commit(path, count, active, context_len, features, tables=(), into=None):
    batch, size = path.shape
    nodes, width = features.shape[1:]
    if into is None:
        new = features.new_empty(batch, size, width), path.new_empty(batch, size), active.new_empty(batch, size)
        tables, into = (), new
    new_features, positions, keep, *copies = into
    assert all(x.is_contiguous() for x in (positions, keep, *copies))
    assert new_features[0].is_contiguous()
    old = [table.contiguous() for table in tables]
    with torch.cuda.device_of(path):  # type: ignore[no-untyped-call]
        commit_kernel[batch, keep.shape[1], max(1, triton.cdiv(width, BLOCK))](
            path.contiguous(), count, active.contiguous(), context_len.contiguous(), features.contiguous(),
            *[*old, None, None][:2], new_features, positions, keep, *[*copies, None, None][:2],
            count.stride(0), new_features.stride(0), keep.shape[1], nodes, old[0].shape[1] if old else 0,
            G=size, WIDTH=width, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return new_features[:, :size], positions[:, :size], keep[:, :size]
