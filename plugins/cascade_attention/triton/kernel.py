"""The fused kernel of cascade attention: `reference.py` in one pass over K and V, with one online softmax.

One program computes BLOCK_M packed rows of one request and one K/V head. All GROUP = Hq / Hkv query heads of that K/V
head are rows of its tile (row t, head g at t·GROUP + g), so K and V are loaded once for them:

                      context, through the page table                new rows, BLOCK_N columns a tile
                   split 0      split 1      split 2 (the last)
                 ┌────────────┬────────────┬──────────┐            ┌───────────────┬───────────────┐
    rows t, heads│ all ones   │ all ones   │ all ones │ + split 2: │ words of tile │ words of tile │
    0 .. GROUP-1 │            │            │ context_ │            │ 0 of attn_mask│ 1, past T 0   │
                 └────────────┴────────────┴──── len ─┘            └───────────────┴───────────────┘
                  all these tiles are divided among the splits, which take as many or one more: new rows are in the last

    memory, all contiguous:   q, out [B, T, Hq, D]    k, v [B, T, Hkv, D]    pages [P, Z, Hkv, D]    page_table [B, M]
                              attn_mask [B, T, ⌈T/32⌉] int32    partial [SPLITS, B, T, Hq, D], lse without D

Chunks of prompts (`starts`) follow one another, N rows in place of B, T, and have no mask words: a row
sees those of its chunk up to itself. Tiles behind the last row of a short chunk do nothing.

Rows of a window (`bounds` [B, T] or [N]) see the context from a position on. A tile begins at the first of its rows'
positions, which the splits divide in place of the whole context: what is in front costs nothing, and neither its pages
nor their numbers are read. A sink (`sinks` [Hq]) is a score without a value, which the last split begins with.

With several SPLITS `partial` receives results in q's type, each normalised by its own sum, and `lse` the logarithm of
that sum, fp32 of base 2, -inf for an empty split. Programs of one tile count themselves in its word of `arrived`, and
each merges a share of its rows (`_shares`), always in the order of the splits. With `scale` the result is quantized. A
row that may attend to nothing gives 0 here (the reference gives NaN).

                  bits 31 to 28: who came, in sixteenths: SPLITS · (16 / SPLITS) is 0 again
                 ┌──────┬──────────────┬─────────────────────┐
    arrived      │ came │      0       │ a bit for each who  │  all changes are atomic additions, at the GPU's scope
                 └──────┴──────────────┴─ left its share ────┘

Why every row is merged once, from all parts, in whatever order programs run, also one behind the other:

- Additions to a word have one order. In it one program is the last to come, and learns so from the word before its own.
- A part is stored, then comes a barrier, then the addition that counts it, which releases. Who merges has read, by an
  operation that acquires, that all have come; what stands between is additions, which pass on what was released (the
  observation order of PTX's memory model). The word goes to the other threads through a barrier, before they load.
- To leave is an addition too. Before the last has come, the last reads the bit and takes that share; after, who leaves
  reads that all have come, and takes the share itself. So no program waits for one that does not run.
- Who takes a share whose bit is set takes the bit back. Bits are distinct, so nothing is carried into the upper bits,
  and the word ends as 0: for the next layer, a graph's replay, or a call with other SPLITS. Those begin with a wait for
  the end of this grid (`wait_for_prior_kernels`). Programs without tiles, or with rows of padding alone, count as well.

Exponentials are of base 2, log2(e) folded into the scale of the scores. FP8 pages are converted to q's type before the
products, as in `from_pages`, so a row's K/V are the same before and after its commit. WIDEN is for the interpreter,
whose products of bf16 are wrong. Triton compiles this file's functions; mypy does not know their types.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import triton
import triton.language as tl

from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels
from d2sd.plugins.shared.kernels import in_fp8_range

#: How often a program reads whether all parts of its tile are there, a latency of the L2 cache each, before it leaves.
POLLS = tl.constexpr(16)


@triton.jit
def _product(a, b, WIDEN: tl.constexpr):
    """a · b in fp32. "ieee" is for fp32 operands: TF32 would keep 10 bits of them."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _widened(pages, scale, TYPE: tl.constexpr):
    """Tile of FP8 pages in q's type: times its scale, rounded once."""
    return (pages.to(tl.float32) * scale).to(TYPE)


@triton.jit
def _fold(scores, values, best, total, sums, SCALE: tl.constexpr, WIDEN: tl.constexpr):
    """Add one tile of keys to the online softmax: running maximum, sum of weights and weighted sum of values.

    Maxima are those of q · k. Scaled with the subtraction, an exponent is one operation of its own.
    """
    new_best = tl.maximum(best, tl.max(scores, 1))
    # A row without any key so far has the maximum -inf, and -inf - -inf is NaN.
    floor = tl.where(new_best == float("-inf"), 0.0, new_best) * SCALE
    weights = tl.exp2(scores * SCALE - floor[:, None])
    faded = tl.exp2(best * SCALE - floor)
    total = total * faded + tl.sum(weights, 1)
    sums = sums * faded[:, None] + _product(weights.to(values.dtype), values, WIDEN)
    return new_best, total, sums


@triton.jit
def _page_ids(table, token, PAGE: tl.constexpr):
    return tl.load(table + token // PAGE).to(tl.uint32)


@triton.jit
def _tiles_of(count, SIZE: tl.constexpr):
    """ceil(count / SIZE) of a count that is not negative, which saves what a sign costs."""
    return ((count.to(tl.uint32) + (SIZE - 1)) // SIZE).to(tl.int32)


@triton.jit
def _words(attn_mask, line, start, words, real, NUMBER: tl.constexpr):
    """Word `NUMBER` of the rows' mask from column `start` on."""
    place = start // 32 + NUMBER
    return tl.load(attn_mask + line * words + place, mask=real & (place < words), other=0)


@triton.jit
def _tiles(
    queries, k, v, k_pages, v_pages, key_scale, value_scale, table, attn_mask, bound, begin, end, context_tiles, front,
    context, passed, first, rows, row, real, head, best, total, sums,
    SCALE: tl.constexpr, HKV: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, WIDEN: tl.constexpr, TYPE: tl.constexpr,
    PAGES: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The tiles from `begin` to `end`: `context_tiles` of pages, and behind them those of new rows.

    One loop for both, so that the copies of new rows are on their way while the last of the context are multiplied.
    PAGES, ROWS: which of the two can be among them.
    """
    place, in_head = tl.arange(0, BLOCK_N), tl.arange(0, PADDED) < HEAD
    lane = head * HEAD + tl.arange(0, PADDED)
    # Tokens and rows past the end are the last one again, and masked: this costs less than copies under conditions.
    final = tl.maximum(context - 1, 0).to(tl.uint32)
    # Ids of pages are read two tiles ahead: copies whose addresses wait for a load of their own turn are not pipelined,
    # and those that wait for one of the turn before wait for all of its latency.
    token = (front + begin * BLOCK_N + place).to(tl.uint32)
    slot, ahead, next = token, token, token
    if PAGES:
        next = tl.minimum(token + BLOCK_N, final)
        ahead = _page_ids(table, next, PAGE)
        token = tl.minimum(token, final)
        slot = _page_ids(table, token, PAGE) * PAGE + token % PAGE
    for tile in tl.range(begin, end, num_stages=STAGES):
        position = front + tile * BLOCK_N  # of the tile's first token
        start = passed + (tile - context_tiles) * BLOCK_N  # its first new row
        fresh = tile >= context_tiles
        new_slot = first.to(tl.uint32) + tl.minimum(start + place, rows - 1).to(tl.uint32)
        if PAGES and ROWS:
            at = tl.where(fresh, new_slot, slot)
            keys_at, values_at = tl.where(fresh, k, k_pages), tl.where(fresh, v, v_pages)
        elif PAGES:
            at, keys_at, values_at = slot, k_pages, v_pages
        else:
            at, keys_at, values_at = new_slot, k, v
        at = at.to(tl.int64)[:, None] * (HKV * HEAD)  # pools exceed 2^31 numbers
        if HEAD == PADDED:
            keys, values = tl.load((keys_at + lane)[None, :] + at), tl.load((values_at + lane)[None, :] + at)
        else:
            keys = tl.load((keys_at + lane)[None, :] + at, mask=in_head[None, :], other=0.0)
            values = tl.load((values_at + lane)[None, :] + at, mask=in_head[None, :], other=0.0)
        if ROWS and not CHUNKS:  # in front of the product, which hides their latency
            words = tl.cdiv(rows, 32)
            bits, more = tl.zeros(row.shape, tl.int32), tl.zeros(row.shape, tl.int32)
            if fresh:
                bits = _words(attn_mask, first + row, start, words, real, 0)
                if BLOCK_N > 32:
                    more = _words(attn_mask, first + row, start, words, real, 1)
        if FP8 and PAGES:
            keys, values = _widened(keys, key_scale, TYPE), _widened(values, value_scale, TYPE)
        scores = _product(queries, tl.trans(keys), WIDEN)
        if PAGES and bound is not None and not fresh:
            scores = tl.where((position + place)[None, :] - bound[:, None] >= 0, scores, float("-inf"))
        if PAGES and position + BLOCK_N > context and not fresh:
            scores = tl.where((place < context - position)[None, :], scores, float("-inf"))
        if ROWS and fresh:
            column = start + place
            if CHUNKS:
                seen = column[None, :] - row[:, None] <= 0  # compared, they spill where registers are short
                if bound is not None:
                    seen = seen & (column[None, :] >= (bound - context)[:, None])
            else:
                word = bits[:, None] if BLOCK_N <= 32 else tl.where((place < 32)[None, :], bits[:, None], more[:, None])
                seen = ((word >> (column % 32)[None, :]) & 1) != 0
            scores = tl.where(seen, scores, float("-inf"))
        best, total, sums = _fold(scores, values, best, total, sums, SCALE, WIDEN)
        if PAGES:
            if not ROWS:  # saves registers
                next = tl.minimum((position + BLOCK_N + place).to(tl.uint32), final)
            slot = ahead * PAGE + next % PAGE
            next = tl.minimum((position + 2 * BLOCK_N + place).to(tl.uint32), final)
            if tile + 2 < end:  # in a branch: it would be pipelined too, and each turn wait for it
                ahead = _page_ids(table, next, PAGE)
    return best, total, sums


@triton.jit
def store_result(out, at, result, mask, scale, TYPE: tl.constexpr):
    """Rounded to the type of queries, and then to FP8 if there is a scale."""
    result = result.to(TYPE)
    if scale is not None:
        result = in_fp8_range(result, tl.load(scale))
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _shares(arrived, SPLITS: tl.constexpr):
    """Announces that this program's part is stored, and gives the shares of the tile's rows that it is to merge, a bit
    each: its own, which is its place in the order in which they came, those of others that left, or none.
    """
    STEP: tl.constexpr = 16 // SPLITS
    COME: tl.constexpr = (STEP if STEP < 8 else STEP - 16) << 28  # 8 has the sign's bit
    word = tl.atomic_add(arrived, COME, sem="acq_rel")
    mine = ((word >> 28) & 15) // STEP
    shares = 1 << mine
    word += COME
    if mine == SPLITS - 1:
        left = word & 65535
        if left != 0:
            tl.atomic_add(arrived, -left, sem="relaxed")
        shares = shares | left
    else:
        polls = 0
        while ((word >> 28) != 0) & (polls < POLLS):
            word = tl.atomic_add(arrived, 0, sem="acquire")
            polls += 1
        if (word >> 28) != 0:
            word = tl.atomic_add(arrived, shares, sem="acq_rel")
            if (word >> 28) != 0:
                shares = 0
            else:
                tl.atomic_add(arrived, -shares, sem="relaxed")
    return shares


@triton.jit
def _merge(
    out, scale, partial, lse, base, tile, rows, lines, HKV: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr,
    PADDED: tl.constexpr, SPLITS: tl.constexpr, SHARE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Weighs the parts of SHARE packed rows, from `tile` on, by their sums, adds and stores them."""
    packed = (tile + tl.arange(0, SHARE)).to(tl.uint32)
    real = packed // GROUP < rows
    line = packed // GROUP * (HKV * GROUP) + packed % GROUP
    lane = tl.arange(0, PADDED)
    at, mask = line[:, None] * HEAD + lane[None, :], real[:, None] & (lane < HEAD)[None, :]
    partial, lse = partial + base * HEAD, lse + base
    sums, values = (), ()
    for part in tl.static_range(SPLITS):
        logs = tl.load(lse + part * lines + line, mask=real, other=float("-inf"))
        tile_part = tl.load(partial + part * lines * HEAD + at, mask=mask, other=0.0)
        sums, values = sums + (logs,), values + (tile_part,)  # noqa: RUF005  # Triton has no starred tuples
    best = sums[0]
    for part in tl.static_range(1, SPLITS):
        best = tl.maximum(best, sums[part])
    floor = tl.where(best == float("-inf"), 0.0, best)
    total, result = tl.zeros([SHARE], tl.float32), tl.zeros([SHARE, PADDED], tl.float32)
    for part in tl.static_range(SPLITS):
        weights = tl.exp2(sums[part] - floor)
        total += weights
        result += weights[:, None] * values[part].to(tl.float32)
    result = result * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    store_result(out, base * HEAD + at, result, mask, scale, TYPE)


@dependent_kernel(do_not_specialize=["rows", "columns"])
def cascade_attention_kernel(
    q, k, v, k_pages, v_pages, page_table, context_len, attn_mask, starts, bounds, sinks, k_scale, v_scale, out, scale,
    partial, lse, arrived, rows, columns,
    SCALE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FP8: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, B·Hkv, SPLITS): the tiles of one K/V head run side by side and share it in the L2 cache.

    rows = T, of chunks at least the longest, columns = M, SCALE = D^-0.5 · log2(e), HEAD = D, PADDED ≥ D a power of
    two, PAGE = Z.
    """
    wait_for_prior_kernels()
    TYPE: tl.constexpr = q.dtype.element_ty
    split = tl.program_id(2)
    request = (tl.program_id(1) // HKV).to(tl.int64)
    head = tl.program_id(1) % HKV

    if starts is None:
        first = request * rows
    else:
        first = tl.load(starts + request)
        rows = (tl.load(starts + request + 1) - first).to(tl.int32)

    context = tl.load(context_len + request).to(tl.int32)
    # Queries: the packed rows of this tile; those past T·GROUP are masked and not stored.
    packed = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.uint32)
    row = (packed // GROUP).to(tl.int32)
    real = row < rows
    lane = tl.arange(0, PADDED)
    in_head = lane < HEAD
    base = first * (HKV * GROUP) + head * GROUP  # of lines, 64 bits; those of a request are counted in 32
    line = packed // GROUP * (HKV * GROUP) + packed % GROUP
    in_tile = real[:, None] & in_head[None, :]
    at = line[:, None] * HEAD + lane[None, :]
    queries = tl.load(q + base * HEAD + at, mask=in_tile, other=0.0)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, PADDED], tl.float32)
    if sinks is not None:
        last = split == SPLITS - 1
        sink = tl.load(sinks + head * GROUP + packed % GROUP).to(tl.float32) * (1.4426950408889634 / SCALE)  # log2(e)
        best, total = tl.where(last, sink, best), tl.where(last, 1.0, total)
    key_scale, value_scale = 1.0, 1.0
    if FP8:
        key_scale, value_scale = tl.load(k_scale), tl.load(v_scale)

    # Tiles of the context, then of the new rows; of both this split's share.
    bound, front, passed, seen_rows = None, 0, 0, rows
    if bounds is not None:
        bound = tl.load(bounds + first + row, mask=real, other=2147483647).to(tl.int32)
        least = tl.min(bound, 0)  # of this tile's rows
        front = tl.minimum(least, context)
        if starts is not None:  # rows of a chunk in front of all windows
            passed = tl.maximum(tl.minimum(least - context, rows), 0) // BLOCK_N * BLOCK_N
    context_tiles = _tiles_of(context - front, BLOCK_N)
    if starts is not None:  # up to the last row of the tile, if it has one
        seen_rows = tl.minimum(rows, tl.max(row, 0) + 1)
    tiles = context_tiles + _tiles_of(tl.maximum(seen_rows - passed, 0), BLOCK_N)
    if starts is not None:
        tiles = tl.where(tl.program_id(0) * BLOCK_M < rows * GROUP, tiles, 0)
    begin, end = _tiles_of(split * tiles, SPLITS), _tiles_of((split + 1) * tiles, SPLITS)
    table = page_table + request * columns
    APART: tl.constexpr = FP8 or starts is not None  # one loop reads one type; of chunks it would spill
    for part in tl.static_range(2 if APART else 1):
        best, total, sums = _tiles(
            queries, k, v, k_pages, v_pages, key_scale, value_scale, table, attn_mask, bound,
            begin if part == 0 else tl.maximum(begin, context_tiles),
            tl.minimum(end, context_tiles) if APART and part == 0 else end,
            context_tiles, front, context, passed, first.to(tl.int32), rows, row, real, head, best, total, sums,
            SCALE, HKV, HEAD, PADDED, PAGE, BLOCK_N, STAGES, FP8, WIDEN, TYPE, part == 0, not APART or part == 1,
            starts is not None,
        )  # fmt: skip

    # Store: an empty share would give 0 / 0, and NaN times the merge's weight of 0 is NaN.
    total = tl.where(total == 0.0, 1.0, total)
    result = sums * (1.0 / total)[:, None]
    if SPLITS == 1:
        store_result(out, base * HEAD + at, result, in_tile, scale, TYPE)
    else:
        requests = (tl.num_programs(1) // HKV).to(tl.int64)
        lines = (requests * rows if starts is None else tl.load(starts + requests)) * (HKV * GROUP)
        mine = split * lines + base
        tl.store(lse + mine + line, best * SCALE + tl.log2(total), mask=real)
        tl.store(partial + mine * HEAD + at, result.to(TYPE), mask=in_tile)
        tl.debug_barrier()  # one thread announces the stores of all
        place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        shares = _shares(arrived + place, SPLITS)
        SHARE: tl.constexpr = BLOCK_M // SPLITS
        for share in tl.range(0, SPLITS, num_stages=1):
            if ((shares >> share) & 1) != 0:
                _merge(
                    out, scale, partial, lse, base, tl.program_id(0) * BLOCK_M + share * SHARE, rows, lines,
                    HKV, GROUP, HEAD, PADDED, SPLITS, SHARE, TYPE,
                )  # fmt: skip


@dependent_kernel(do_not_specialize=["rows", "request_stride", "row_stride", "column_stride"])
def pack_mask_kernel(attn_mask, words, rows, request_stride, row_stride, column_stride):
    """Grid (B·T, ⌈T/32⌉): one program packs 32 columns of a row. The mask may be strided, words are contiguous."""
    wait_for_prior_kernels()
    line, word = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bit = tl.arange(0, 32)
    column = word * 32 + bit
    at = attn_mask + (line // rows) * request_stride + (line % rows) * row_stride + column * column_stride
    seen = tl.load(at, mask=column < rows, other=0).to(tl.int32)
    tl.store(words + line * tl.num_programs(1) + word, tl.sum(seen << bit, 0))
