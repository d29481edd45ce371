"""The gated delta rule over many rows at once: all rows of a tree, or pieces of a prompt's chunk.

One program computes BV columns of one value head of one request. Rows come in tiles of TILE, in their order; each tile
reads those columns of the state once, later tiles from the L2 cache:

    right = beta (v - e^G Sᵀ k)      out = e^G Sᵀ q                          S: the state
    tree: for each earlier tile      right -= A D        out += P D          D: its changes, which this program stored
    changes = (I + A)^-1 right       out += P changes                        A, P: of the tile with itself
    chunk:                           S = e^G S + Kᵀ changes      in memory, but of slot 0

I + A is inverted in blocks of 16 on its diagonal, row by row, and solved block after block: powers of A, with which it
could be inverted at once, grow like binomial coefficients where keys are alike.

Numbers. Products of bf16 keys and queries are exact, and divided by norms afterwards. A factor in fp32 is split into
two of bf16, so that tensor cores multiply 16 bits of it; other types are multiplied in fp32. The sum G of log gates may
be thousands where differences are small: its gates are split into multiples of 1/256, whose sums are exact, and
the rest. Gates below e^-104, which fp32 has no number for, are taken as that.

Triton compiles this file's functions; mypy does not know their types. WIDEN is for the interpreter, whose products of
bf16 are wrong.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

from d2sd.plugins.delta_rule.triton.recurrence import EPS
from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels

BLOCK = tl.constexpr(16)


@triton.jit
def _product(a, b, total, WIDEN: tl.constexpr):
    """total + a · b, of one type, in fp32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _with(a, b, total, WIDEN: tl.constexpr):
    """total + a · b with b in fp32, of which bf16 a's multiply 16 bits."""
    if a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        low = (b - high.to(tl.float32)).to(tl.bfloat16)
        return _product(a, high, _product(a, low, total, WIDEN), WIDEN)
    else:
        return _product(a.to(tl.float32), b, total, WIDEN)


@triton.jit
def _both(a, b, total, rows_type: tl.constexpr, WIDEN: tl.constexpr):
    """total + a · b with both in fp32; for bf16 rows, of 16 bits of each."""
    if rows_type == tl.bfloat16:
        high = a.to(tl.bfloat16)
        low = (a - high.to(tl.float32)).to(tl.bfloat16)
        return _with(high, b, _product(low, b.to(tl.bfloat16), total, WIDEN), WIDEN)
    else:
        return _product(a, b, total, WIDEN)


@triton.jit
def _part(x, at, real, start, WIDTH: tl.constexpr):
    """Columns of rows of queries or keys from `start` on."""
    return tl.load(x + at[:, None] + (start + tl.arange(0, WIDTH))[None, :], mask=real[:, None], other=0.0)


@triton.jit
def _squares(x):
    x = x.to(tl.float32)
    return tl.sum(x * x, 1)


@triton.jit
def _of_state(
    q, k, at, real, of_state, TILE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Products of rows with the state and with the rows themselves: Sᵀ k, Sᵀ q, k · k, k · q; one over both norms."""
    key_squares, query_squares = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    from_keys, from_queries = tl.zeros([TILE, BV], tl.float32), tl.zeros([TILE, BV], tl.float32)
    own, crossed = tl.zeros([TILE, TILE], tl.float32), tl.zeros([TILE, TILE], tl.float32)
    for start in tl.range(0, DK, BK, num_stages=1):
        keys, queries = _part(k, at, real, start, BK), _part(q, at, real, start, BK)
        state = tl.load(of_state[None, :] + (start + tl.arange(0, BK))[:, None] * DV)
        key_squares += _squares(keys)
        query_squares += _squares(queries)
        from_keys = _with(keys, state, from_keys, WIDEN)
        from_queries = _with(queries, state, from_queries, WIDEN)
        own = _product(keys, tl.trans(keys), own, WIDEN)
        crossed = _product(queries, tl.trans(keys), crossed, WIDEN)
    return from_keys, from_queries, own, crossed, tl.rsqrt(key_squares + EPS), tl.rsqrt(query_squares + EPS)


@triton.jit
def _of_rows(q, k, at, real, others, TILE: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr):
    """Products of rows with earlier ones: k · k and k · q; one over the norms of those."""
    squares = tl.zeros([TILE], tl.float32)
    own, crossed = tl.zeros([TILE, TILE], tl.float32), tl.zeros([TILE, TILE], tl.float32)
    for start in tl.range(0, DK, BK, num_stages=1):
        keys, queries = _part(k, at, real, start, BK), _part(q, at, real, start, BK)
        theirs = _part(k, others, others >= 0, start, BK)
        squares += _squares(theirs)
        own = _product(keys, tl.trans(theirs), own, WIDEN)
        crossed = _product(queries, tl.trans(theirs), crossed, WIDEN)
    return own, crossed, tl.rsqrt(squares + EPS)


@triton.jit
def _gates(g, at, real):
    """Log gates in two parts: multiples of 1/256, and the rest."""
    gate = tl.maximum(tl.load(g + at, mask=real, other=0.0), -104.0)
    coarse = (gate * 256.0).to(tl.int32).to(tl.float32) * 0.00390625
    return coarse, gate - coarse


@triton.jit
def _seen(words, line, real, width, start, TILE: tl.constexpr):
    """[rows, TILE] of the mask's columns from `start` on."""
    column = tl.arange(0, TILE)
    word = start // 32
    low = tl.load(words + line * width + word, mask=real, other=0)
    high = tl.load(words + line * width + word + 1, mask=real & (word + 1 < width), other=0)
    of_column = tl.where((start % 32 + column < 32)[None, :], low[:, None], high[:, None])
    return ((of_column >> ((start + column) % 32)[None, :]) & 1) != 0


@triton.jit
def _decay(seen, coarse, fine, other_coarse, other_fine):
    """e^(G_i - G_j), 0 where row i does not see row j."""
    between = (coarse[:, None] - other_coarse[None, :]) + (fine[:, None] - other_fine[None, :])
    return tl.where(seen, tl.exp(tl.where(seen, between, 0.0)), 0.0)


@triton.jit
def _solved(a, right, TILE: tl.constexpr, TYPE: tl.constexpr, WIDEN: tl.constexpr):
    """x of (I + a) x = right, a strictly lower triangular."""
    BLOCKS: tl.constexpr = TILE // BLOCK
    block = tl.arange(0, BLOCKS)
    row = tl.arange(0, BLOCK)
    same = block[:, None, None, None] == block[None, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(a, [BLOCKS, BLOCK, BLOCKS, BLOCK]), 0.0), 2)
    inverse = tl.where((row[:, None] == row[None, :])[None, :, :], 1.0, 0.0) + tl.zeros_like(diagonal)
    for i in tl.range(1, BLOCK):
        here = (row == i)[None, :, None]
        of_row = tl.sum(tl.where(here, diagonal, 0.0), 1)
        inverse -= tl.where(here, tl.sum(of_row[:, :, None] * inverse, 1)[:, None, :], 0.0)
    spread = tl.where(same, inverse[:, :, None, :], 0.0)
    inverses = tl.reshape(spread, [TILE, TILE])
    place = tl.arange(0, TILE) // BLOCK
    below = tl.where(place[:, None] > place[None, :], -a, 0.0)
    none = tl.zeros(right.shape, tl.float32)
    x = _both(inverses, right, none, TYPE, WIDEN)
    for _ in tl.range(1, BLOCKS):  # each turn ends one block more
        x = _both(inverses, _both(below, x, right, TYPE, WIDEN), none, TYPE, WIDEN)
    return x


@dependent_kernel(do_not_specialize=["rows"])
def tree_rule_kernel(
    q, k, v, g, beta, states, slots, words, out, changes, sums, rows,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, TILE: tl.constexpr,
    BK: tl.constexpr, MANY: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid (Hv·Dv / BV, B). MANY tiles keep `changes` [B, T, Hv, Dv] and `sums` [2, Dv / BV, B, T, Hv], fp32.

    rows = T; words [B, T, ⌈T/32⌉] int32 are the mask of ancestors and self, as of cascade attention.
    """
    wait_for_prior_kernels()
    TYPE: tl.constexpr = k.dtype.element_ty
    part, head = tl.program_id(0) % (DV // BV), tl.program_id(0) // (DV // BV)
    request = tl.program_id(1).to(tl.int64)
    key_head, column = head // (HV // HK), part * BV + tl.arange(0, BV)
    of_state = states + (tl.load(slots + request) * HV + head) * DK * DV + column
    place, width = tl.arange(0, TILE), tl.cdiv(rows, 32)
    coarse_sums = sums
    fine_sums = sums
    if MANY:
        lines = tl.num_programs(1).to(tl.int64) * rows * HV
        coarse_sums += part * lines
        fine_sums += (DV // BV + part) * lines

    for start in tl.range(0, rows, TILE, num_stages=1):
        real = start + place < rows
        line = request * rows + start + place
        of_head, of_keys = line * HV + head, (line * HK + key_head) * DK
        seen = _seen(words, line, real, width, start, TILE)
        own_coarse, own_fine = _gates(g, of_head, real)
        coarse = tl.sum(tl.where(seen, own_coarse[None, :], 0.0), 1)
        fine = tl.sum(tl.where(seen, own_fine[None, :], 0.0), 1)
        if MANY:
            for before in tl.range(0, start, TILE, num_stages=1):
                other = request * rows + before + place
                theirs = _seen(words, line, real, width, before, TILE)
                more_coarse, more_fine = _gates(g, other * HV + head, other >= 0)
                coarse += tl.sum(tl.where(theirs, more_coarse[None, :], 0.0), 1)
                fine += tl.sum(tl.where(theirs, more_fine[None, :], 0.0), 1)
        from_keys, from_queries, own, crossed, over_key, over_query = _of_state(
            q, k, of_keys, real, of_state, TILE, DK, DV, BV, BK, WIDEN
        )
        over_query *= DK**-0.5
        factor = tl.load(beta + of_head, mask=real, other=0.0).to(tl.float32)
        at = of_head[:, None] * DV + column[None, :]
        values = tl.load(v + at, mask=real[:, None], other=0.0).to(tl.float32)
        since = tl.exp(coarse + fine)
        right = factor[:, None] * (values - (since * over_key)[:, None] * from_keys)
        result = (since * over_query)[:, None] * from_queries
        decay = _decay(seen, coarse, fine, coarse, fine) * over_key[None, :]
        a = tl.where(place[:, None] > place[None, :], (factor * over_key)[:, None] * decay * own, 0.0)
        p = over_query[:, None] * decay * crossed
        if MANY:
            for before in tl.range(0, start, TILE, num_stages=1):
                other = request * rows + before + place
                of_other = other * HV + head
                theirs = _seen(words, line, real, width, before, TILE)
                more, more_crossed, over_other = _of_rows(
                    q, k, of_keys, real, (other * HK + key_head) * DK, TILE, DK, BK, WIDEN
                )
                other_coarse, other_fine = tl.load(coarse_sums + of_other), tl.load(fine_sums + of_other)
                faded = _decay(theirs, coarse, fine, other_coarse, other_fine) * over_other[None, :]
                change = tl.load(changes + of_other[:, None] * DV + column[None, :])
                right = _both((-factor * over_key)[:, None] * faded * more, change, right, TYPE, WIDEN)
                result = _both(over_query[:, None] * faded * more_crossed, change, result, TYPE, WIDEN)
        change = _solved(a, right, TILE, TYPE, WIDEN)
        result = _both(p, change, result, TYPE, WIDEN)
        tl.store(out + at, result.to(out.dtype.element_ty), mask=real[:, None])
        if MANY:
            tl.store(changes + at, change, mask=real[:, None])
            tl.store(coarse_sums + of_head, coarse, mask=real)
            tl.store(fine_sums + of_head, fine, mask=real)
            tl.debug_barrier()  # other threads read them


@dependent_kernel
def chunk_rule_kernel(
    q, k, v, g, beta, states, slots, starts, out,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, TILE: tl.constexpr,
    BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid (Hv·Dv / BV, B), of rows [N, ...]. After each tile its program's columns of the state are written."""
    wait_for_prior_kernels()
    TYPE: tl.constexpr = k.dtype.element_ty
    part, head = tl.program_id(0) % (DV // BV), tl.program_id(0) // (DV // BV)
    request = tl.program_id(1).to(tl.int64)
    key_head, column = head // (HV // HK), part * BV + tl.arange(0, BV)
    slot = tl.load(slots + request)
    of_head_state = states + (slot * HV + head) * DK * DV
    of_state = of_head_state + column
    place = tl.arange(0, TILE)
    causal = place[:, None] >= place[None, :]
    end = tl.load(starts + request + 1)
    for start in tl.range(tl.load(starts + request), end, TILE, num_stages=1):
        line = start + place
        real = line < end
        of_head, of_keys = line * HV + head, (line * HK + key_head) * DK
        own_coarse, own_fine = _gates(g, of_head, real)
        coarse = tl.sum(tl.where(causal, own_coarse[None, :], 0.0), 1)
        fine = tl.sum(tl.where(causal, own_fine[None, :], 0.0), 1)
        from_keys, from_queries, own, crossed, over_key, over_query = _of_state(
            q, k, of_keys, real, of_state, TILE, DK, DV, BV, BK, WIDEN
        )
        over_query *= DK**-0.5
        factor = tl.load(beta + of_head, mask=real, other=0.0).to(tl.float32)
        at = of_head[:, None] * DV + column[None, :]
        values = tl.load(v + at, mask=real[:, None], other=0.0).to(tl.float32)
        since = tl.exp(coarse + fine)
        right = factor[:, None] * (values - (since * over_key)[:, None] * from_keys)
        decay = _decay(causal, coarse, fine, coarse, fine) * over_key[None, :]
        a = tl.where(place[:, None] > place[None, :], (factor * over_key)[:, None] * decay * own, 0.0)
        change = _solved(a, right, TILE, TYPE, WIDEN)
        p = over_query[:, None] * decay * crossed
        result = _both(p, change, (since * over_query)[:, None] * from_queries, TYPE, WIDEN)
        tl.store(out + at, result.to(out.dtype.element_ty), mask=real[:, None])
        # Rows behind the last have a gate of 0, so every row of the last tile ends where the last real one does.
        whole_coarse, whole_fine = tl.sum(own_coarse, 0), tl.sum(own_fine, 0)
        left = tl.exp((whole_coarse - coarse) + (whole_fine - fine)) * over_key
        kept, change = tl.exp(whole_coarse + whole_fine), tl.where(real, left, 0.0)[:, None] * change
        tl.debug_barrier()  # other threads have read the state
        for first in tl.range(0, DK, BK, num_stages=1):
            inside = (first + tl.arange(0, BK))[:, None] * DV + column[None, :]
            state = kept * tl.load(of_head_state + inside)
            state = _with(tl.trans(_part(k, of_keys, real, first, BK)), change, state, WIDEN)
            tl.store(of_head_state + inside, state, mask=slot > 0)
        tl.debug_barrier()  # and written it
