"""The rows that a step commits, in one launch: see `d2sd.plugins.handover.commit`.

What receives them has the rows of one request side by side.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels

#: Numbers of one program, and its warps: 16 numbers a thread.
BLOCK, WARPS = 2048, 4

# Shape letters: B requests, G block size γ, G' ≥ G rows of a request in what is new, N nodes, F features of a node, M
# pages a request.


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
    with torch.cuda.device_of(path):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        commit_kernel[batch, keep.shape[1], max(1, triton.cdiv(width, BLOCK))](
            path.contiguous(), count, active.contiguous(), context_len.contiguous(), features.contiguous(),
            *[*old, None, None][:2], new_features, positions, keep, *[*copies, None, None][:2],
            count.stride(0), new_features.stride(0), keep.shape[1], nodes, old[0].shape[1] if old else 0,
            G=size, WIDTH=width, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return new_features[:, :size], positions[:, :size], keep[:, :size]
