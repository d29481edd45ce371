"""The gated delta rule row by row: commits, and with `exact` trees and chunks of prompts.

One program carries BV columns of a head's state in registers along one list of rows, and reads and writes them once:

    commit    the first `count` rows of `path` [B, G]          states written
    tree      `order` [B, T, T + 2] of a row that nothing      outputs written, of all rows of the path: those on
              follows: its ancestors and itself                several are the same bits from each
    chunk     rows starts[b] .. starts[b + 1]                  both

All three do the same steps over the same tile, so a row's result and a state's bits depend on the rows of a path alone.
Triton compiles this file's functions; mypy does not know their types.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels

#: Under the root of the sum of squares.
EPS = tl.constexpr(1e-6)


@triton.jit
def _normed(x):
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) + EPS)


@dependent_kernel(do_not_specialize=["rows", "width", "pool"])
def recurrence_kernel(
    q, k, v, g, beta, states, slots, path, count, order, starts, out, rows, width, pool,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Grid (Hv·Dv / BV, B or with `order` B·T, L). rows: of a layer and request, of chunks N; width = G, pool = P."""
    wait_for_prior_kernels()
    head, column = tl.program_id(0) // (DV // BV), tl.program_id(0) % (DV // BV) * BV + tl.arange(0, BV)
    line, layer = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    request = line if order is None else line // rows
    slot = tl.load(slots + request)
    first = request * rows
    if starts is not None:
        first = tl.load(starts + request)
        steps = (tl.load(starts + request + 1) - first).to(tl.int32)
    elif order is not None:
        steps = tl.load(order + line * (rows + 2) + rows)
        leader = tl.load(order + line * (rows + 2) + rows + 1)
        steps = tl.where(leader == line % rows, steps, 0)  # a row that others follow is on their paths
    else:
        steps = tl.where(slot > 0, tl.load(count + request), 0).to(tl.int32)
        first += layer * tl.num_programs(1) * rows

    lane = tl.arange(0, DK)
    at = (((layer * pool + slot) * HV + head) * DK + lane)[:, None] * DV + column[None, :]
    state = tl.load(states + at, mask=(lane < tl.where(steps > 0, DK, 0))[:, None], other=0.0)
    for step in tl.range(0, steps, num_stages=1):
        if starts is not None:
            row = first + step
        elif order is not None:
            row = first + tl.load(order + line * (rows + 2) + step)
        else:
            row = first + tl.load(path + request * width + step)
        of_head = row * HV + head
        of_keys = (row * HK + head // (HV // HK)) * DK + lane
        key = _normed(tl.load(k + of_keys))
        value = tl.load(v + of_head * DV + column).to(tl.float32)
        state *= tl.exp(tl.load(g + of_head))
        change = tl.load(beta + of_head).to(tl.float32) * (value - tl.sum(state * key[:, None], 0))
        state += key[:, None] * change[None, :]
        if out is not None:
            query = _normed(tl.load(q + of_keys)) * (DK**-0.5)
            result = tl.sum(state * query[:, None], 0)
            tl.store(out + of_head * DV + column, result.to(out.dtype.element_ty))
    if order is None:
        tl.store(states + at, state, mask=(lane < tl.where((steps > 0) & (slot > 0), DK, 0))[:, None])
