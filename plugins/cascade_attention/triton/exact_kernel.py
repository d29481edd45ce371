"""Cascade attention whose sums follow positions: where keys are stored and what else is run change no bit of a row.

A tile holds the keys of BLOCK_N positions, from a multiple of BLOCK_N on. In front of the last such multiple all keys
are committed and shared by the rows of a program. Behind it each path of a tree has keys of its own: committed ones,
and its rows. They are put into the places of their positions, for one path at a time; for the rows that are not on it
they are masked, as are those behind a row for that row. A row is on the path of its leader, the last row whose keys
begin with its own. The rows of a prompt's chunk (`order` None) are one path.

                  position   0 ........ 31 | 32 ....... 63 | 64 .. 69 | 70 71 72 ..      context_len 70, BLOCK_N 32
                             pages: for all rows           | pages    | order[t]: leader t's ancestors and t itself
                             one tile at a time            | a tile of the rows that t leads
                  split      0, up to SPAN positions; then 1, ..: `merge_splits_kernel` adds them up, first to last

Rows of a window (`bounds`) see positions from their own first one on. The tiles in front of it change nothing, and are
skipped where all rows of a program have them in front; in the tiles of a path, keys have the places of their positions
as before. A row whose window begins behind the context has a path to itself: no other begins with its keys. A sink is a
score without a value, with which the first split begins.

Numbers of pages and of rows are read a tile ahead: copies whose addresses wait for a load of their turn are not
pipelined.

Tile heights, SPAN and the order of the merge are the same for every batch, bucket and number of rows. Tiles of masked
keys change nothing: they multiply sums by 1 and add products with 0. Neither do empty splits. FP8 pages are converted
to q's type.

Shapes are those of kernel.py. WIDEN is for the interpreter, whose products of bf16 are wrong. Triton compiles this
file's functions; mypy does not know their types.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels


@triton.jit
def _product(a, b, sums, WIDEN: tl.constexpr):
    """sums + a · b in fp32. "ieee" is for fp32 operands."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def _fold(queries, keys, values, seen, best, total, sums, SCALE: tl.constexpr, WIDEN: tl.constexpr):
    """Add one tile of keys to the online softmax: running maximum, sum of weights and weighted sum of values."""
    scores = _product(queries, tl.trans(keys), tl.zeros(seen.shape, tl.float32), WIDEN) * SCALE
    scores = tl.where(seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    # A row without any key so far has the maximum -inf, and -inf - -inf is NaN.
    floor = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - floor[:, None])
    faded = tl.exp2(best - floor)
    total = total * faded + tl.sum(weights, 1)
    return new_best, total, _product(weights.to(values.dtype), values, sums * faded[:, None], WIDEN)


@triton.jit
def _paged(paged, scale, mask, TYPE: tl.constexpr, FP8: tl.constexpr):
    """Tile of pages in q's type: FP8 times its scale, rounded once. Masked lanes are 0."""
    tile = tl.load(paged, mask=mask, other=0.0)
    if FP8:
        return (tile.to(tl.float32) * scale).to(TYPE)
    return tile.to(TYPE)


@triton.jit
def _gathered(paged, fresh, scale, from_page, from_rows, TYPE: tl.constexpr, FP8: tl.constexpr):
    """Tile of keys or values from pages and from rows of the pass."""
    if FP8:
        committed = _paged(paged, scale, from_page, TYPE, FP8)
        return tl.where(from_page, committed, tl.load(fresh, mask=from_rows, other=0.0))
    else:  # Triton gives both returns a type
        return tl.load(tl.where(from_page, paged, fresh), mask=from_page | from_rows, other=0.0)


@triton.jit
def _pages_of(table, position, front, end, PAGE: tl.constexpr):
    """Pages of positions from `front` to `end`; of others 0."""
    return tl.load(table + position // PAGE, mask=(position >= front) & (position < end), other=0)


@triton.jit
def _path_of(leader, lead, counts, bounds, bound, order, least, context):
    """How many new keys the rows of a path see, the first position of their windows, and that of the first new key."""
    mine = lead == leader
    count = tl.max(tl.where(mine, counts, 0), 0)
    if bounds is None or order is None:
        return count, least, context
    else:
        front = tl.min(tl.where(mine, bound, 2147483647), 0)
        return count, front, tl.maximum(context, front)


@triton.jit
def _columns_of(order, request, leader, new, rank, count):
    """Rows of the pass whose keys a path has from its first on; of a chunk, all."""
    if order is None:
        return rank
    else:  # Triton gives both returns a type
        fresh = (rank >= 0) & (rank < count)
        return tl.load(order + (request * new + leader) * (new + 2) + rank, mask=fresh, other=0)


@dependent_kernel(do_not_specialize=["rows", "new", "first", "columns"])
def attention_kernel(
    q, k, v, k_pages, v_pages, page_table, context_len, order, bounds, sinks, k_scale, v_scale, out, lse, rows, new,
    first, columns,
    SCALE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, SPAN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FP8: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, B·Hkv, splits). q has `rows` rows a request: those from `first` on of the pass's `new` rows.

    order [B, new, new + 2] is `AttnMask.order`, bounds [B, new] its `first`; out [B, rows, Hq, D], or with SPLIT fp32
    [splits, B, rows, Hq, D], of which empty splits are not written, and lse without D. columns = M, HEAD = D, PAGE = Z.
    """
    wait_for_prior_kernels()
    TYPE: tl.constexpr = q.dtype.element_ty
    split = tl.program_id(2)
    request = (tl.program_id(1) // HKV).to(tl.int64)
    head = tl.program_id(1) % HKV

    packed = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = packed // GROUP
    real = row < rows
    lane = tl.arange(0, PADDED)
    in_head = (lane < HEAD)[None, :]
    line = (request * rows + row) * (HKV * GROUP) + head * GROUP + packed % GROUP
    queries = tl.load(q + line[:, None] * HEAD + lane[None, :], mask=real[:, None] & in_head, other=0.0)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, PADDED], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head * GROUP + packed % GROUP).to(tl.float32) * 1.4426950408889634  # log2(e)
        best, total = tl.where(split == 0, sink, best), tl.where(split == 0, 1.0, total)
    key_scale, value_scale = 1.0, 1.0
    if FP8:
        key_scale, value_scale = tl.load(k_scale), tl.load(v_scale)

    context = tl.load(context_len + request).to(tl.int32)
    shared = context // BLOCK_N * BLOCK_N
    begin = split * SPAN
    end = begin + SPAN
    table = page_table + request * columns
    everything = tl.full([BLOCK_M, BLOCK_N], 1, tl.int1)
    lane_n = tl.arange(0, BLOCK_N)
    least = 0  # position that any row of this program sees
    if bounds is not None:
        bound = tl.load(bounds + request * new + first + row, mask=real, other=2147483647).to(tl.int32)
        least = tl.min(bound, 0)
        begin = tl.maximum(begin, least // BLOCK_N * BLOCK_N)
    stop = tl.minimum(end, shared)
    page = _pages_of(table, begin + lane_n, least, stop, PAGE)
    for start in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
        position = start + lane_n
        if bounds is None:
            read, seen = in_head, everything
        else:
            read, seen = in_head & (position >= least)[:, None], position[None, :] - bound[:, None] >= 0
        slot = ((page.to(tl.int64) * PAGE + position % PAGE) * HKV + head)[:, None] * HEAD + lane[None, :]
        keys = _paged(k_pages + slot, key_scale, read, TYPE, FP8)
        values = _paged(v_pages + slot, value_scale, read, TYPE, FP8)
        best, total, sums = _fold(queries, keys, values, seen, best, total, sums, SCALE, WIDEN)
        page = _pages_of(table, position + BLOCK_N, least, stop, PAGE)

    # Behind the shared tiles: `tiles` for each of `paths`, the last leader's first.
    if order is None:
        lead, counts = tl.where(real, 0, -1), first + row + 1  # a row sees so many new keys
    else:
        of_row = order + (request * new + first + row) * (new + 2)
        lead, counts = tl.load(of_row + new + 1, mask=real, other=-1), tl.load(of_row + new, mask=real, other=0)
    counts = tl.where(real, counts, 0)
    farthest = context + tl.max(counts, 0)
    if bounds is not None and order is not None:
        farthest = tl.max(tl.where(real, tl.maximum(context, bound) + counts, 0), 0)
    place = tl.arange(0, BLOCK_M)
    again = (lead[:, None] == lead[None, :]) & (place[None, :] < place[:, None])
    paths = tl.sum((real & (tl.max(again.to(tl.int32), 1) == 0)).to(tl.int32), 0)
    begin = tl.maximum(begin, shared)
    tiles = tl.maximum(tl.cdiv(tl.minimum(end, farthest) - begin, BLOCK_N), 0)

    leader, turn = tl.max(lead, 0), 0
    if bounds is None:
        bound = lead  # not read
    count, front, behind = _path_of(leader, lead, counts, bounds, bound, order, least, context)
    position = begin + lane_n
    page = _pages_of(table, position, front, context, PAGE)
    column = _columns_of(order, request, leader, new, position - behind, count)
    for _ in tl.range(0, paths * tiles, num_stages=STAGES):
        committed, rank = (position >= front) & (position < context), position - behind
        fresh = (rank >= 0) & (rank < count)
        slot = ((page.to(tl.int64) * PAGE + position % PAGE) * HKV + head)[:, None] * HEAD + lane[None, :]
        at = ((request * new + column) * HKV + head)[:, None] * HEAD + lane[None, :]
        from_page, from_rows = committed[:, None] & in_head, fresh[:, None] & in_head
        keys = _gathered(k_pages + slot, k + at, key_scale, from_page, from_rows, TYPE, FP8)
        values = _gathered(v_pages + slot, v + at, value_scale, from_page, from_rows, TYPE, FP8)
        # A row that sees nothing of a tile keeps its sums: times 1, plus weights of 0.
        seen = (rank[None, :] < counts[:, None]) & (lead == leader)[:, None]
        if bounds is not None:
            seen = seen & (position[None, :] - bound[:, None] >= 0)
        best, total, sums = _fold(queries, keys, values, seen, best, total, sums, SCALE, WIDEN)
        turn += 1
        if order is not None:
            done = turn == tiles
            turn = tl.where(done, 0, turn)
            leader = tl.where(done, tl.max(tl.where(lead < leader, lead, -1), 0), leader)
            count, front, behind = _path_of(leader, lead, counts, bounds, bound, order, least, context)
        position = begin + turn * BLOCK_N + lane_n
        page = _pages_of(table, position, front, context, PAGE)
        column = _columns_of(order, request, leader, new, position - behind, count)

    some = total != 0.0  # NaN, of a broken key, is stored
    total = tl.where(some, total, 1.0)
    result = sums / total[:, None]
    stored = real[:, None] & in_head
    if SPLIT:
        requests = (tl.num_programs(1) // HKV).to(tl.int64)
        line += split * requests * rows * (HKV * GROUP)
        tl.store(lse + line, best + tl.log2(total), mask=real)
        stored = stored & some[:, None]
    tl.store(out + line[:, None] * HEAD + lane[None, :], result.to(out.dtype.element_ty), mask=stored)


@dependent_kernel(do_not_specialize=["splits"])
def merge_splits_kernel(partial, lse, out, splits, HEAD: tl.constexpr, PADDED: tl.constexpr):
    """Grid (B·T·Hq,): the splits of one row and head, weighed by their sums and added from the first to the last."""
    wait_for_prior_kernels()
    line, lines = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    lane = tl.arange(0, PADDED)
    best = tl.full([PADDED], float("-inf"), tl.float32)
    total, sums = tl.zeros([PADDED], tl.float32), tl.zeros([PADDED], tl.float32)
    for split in range(splits):
        at = split * lines + line
        size = tl.load(lse + at) + tl.zeros([PADDED], tl.float32)
        part = tl.load(partial + at * HEAD + lane, mask=(lane < HEAD) & (size > float("-inf")), other=0.0)
        new_best = tl.maximum(best, size)
        floor = tl.where(new_best == float("-inf"), 0.0, new_best)
        faded, weight = tl.exp2(best - floor), tl.exp2(size - floor)
        best = new_best
        total = total * faded + weight
        sums = sums * faded + part * weight
    # IEEE division: a single split must come out as it went in.
    result = tl.div_rn(sums, tl.where(total > 0.0, total, 1.0))
    tl.store(out + line * HEAD + lane, result.to(out.dtype.element_ty), mask=lane < HEAD)
