"""The fused kernel of cascade attention: `reference.py` in one pass over K and V, with one online softmax.

One program computes BLOCK_M packed rows of one request and one K/V head. All GROUP = Hq / Hkv query heads of that K/V
head are rows of its tile (row t, head g at t·GROUP + g), so K and V are loaded once for them:

                      context, through the page table                new rows, 32 columns a mask word
                   split 0      split 1      split 2 (the last)
                 ┌────────────┬────────────┬──────────┐            ┌───────────────┬───────────────┐
    rows t, heads│ all ones   │ all ones   │ all ones │ + split 2: │ bits of word 0│ bits of word 1│
    0 .. GROUP-1 │            │            │ context_ │            │ attn_mask[t, u] │ bits past T   │
                 └────────────┴────────────┴──── len ─┘            └───────────────┴──── are 0 ────┘
                  every share ⌈⌈context_len / BLOCK_N⌉ / SPLITS⌉ tiles: the last is the smallest, so it takes the rows

    memory, all contiguous:   q, out [B, T, Hq, D]    k, v [B, T, Hkv, D]    pages [P, Z, Hkv, D]    page_table [B, M]
                              attn_mask [B, T, ⌈T/32⌉] int32    partial [SPLITS, B, T, Hq, D], lse without D

Chunks of prompts (`starts`) follow one another, N rows in place of B, T, and have no mask words: a row
sees those of its chunk up to itself. Tiles behind the last row of a short chunk do nothing.

Rows of a window (`bounds` [B, T] or [N]) see the context from a position on. A tile begins at the first of its rows'
positions, which the splits divide in place of the whole context: what is in front costs nothing, and neither its pages
nor their numbers are read. A sink (`sinks` [Hq]) is a score without a value, which the last split begins with.

With several SPLITS `partial` receives results in q's type, each normalised by its own sum, and `lse` the logarithm of
that sum, fp32 of base 2, -inf for an empty split. Programs of one tile count themselves in `arrived`; the last weighs
and adds all parts, always in the order of the splits, and sets the count back to 0. With `scale` the result is
quantized. A row that may attend to nothing gives 0 here (the reference gives NaN).

Exponentials are of base 2, log2(e) folded into the scale of the scores. FP8 pages are converted to q's type before the
products, as in `from_pages`, so a row's K/V are the same before and after its commit. WIDEN is for the interpreter,
whose products of bf16 are wrong. Triton compiles this file's functions; mypy does not know their types.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels
from d2sd.plugins.shared.kernels import in_fp8_range


@triton.jit
def _product(a, b, WIDEN: tl.constexpr):
    """a · b in fp32. "ieee" is for fp32 operands: TF32 would keep 10 bits of them."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _fold(queries, keys, values, seen, best, total, sums, SCALE: tl.constexpr, WIDEN: tl.constexpr):
    """Add one tile of keys to the online softmax: running maximum, sum of weights and weighted sum of values.

    Maxima are those of q · k. Scaled with the subtraction, an exponent is one operation of its own.
    """
    scores = tl.where(seen, _product(queries, tl.trans(keys), WIDEN), float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    # A row without any key so far has the maximum -inf, and -inf - -inf is NaN.
    floor = tl.where(new_best == float("-inf"), 0.0, new_best) * SCALE
    weights = tl.exp2(scores * SCALE - floor[:, None])
    faded = tl.exp2(best * SCALE - floor)
    total = total * faded + tl.sum(weights, 1)
    sums = sums * faded[:, None] + _product(weights.to(values.dtype), values, WIDEN)
    return new_best, total, sums


@triton.jit
def _widened(pages, scale, FP8: tl.constexpr, TYPE: tl.constexpr):
    """Tile of pages in q's type: FP8 times its scale, rounded once."""
    if FP8:
        return (pages.to(tl.float32) * scale).to(TYPE)
    return pages.to(TYPE)


@triton.jit
def _page_ids(table, token, end, PAGE: tl.constexpr):
    """The pages of these tokens; of those past the end 0."""
    return tl.load(table + token.to(tl.uint32) // PAGE, mask=token < end, other=0)


@triton.jit
def store_result(out, at, result, mask, scale, TYPE: tl.constexpr):
    """Rounded to the type of queries, and then to FP8 if there is a scale."""
    result = result.to(TYPE)
    if scale is not None:
        result = in_fp8_range(result, tl.load(scale))
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _merge(
    out, scale, partial, lse, tile, first, head, rows, lines, HKV: tl.constexpr, GROUP: tl.constexpr,
    HEAD: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Weighs the parts of a tile, whose packed rows begin with `tile`, by their sums, adds and stores them.

    `first` is the request's first row.
    """
    CHUNK: tl.constexpr = min(BLOCK_M, 32 if SPLITS <= 8 else 16)  # more rows at a time would spill
    lane = tl.arange(0, PADDED)
    for start in tl.range(0, BLOCK_M, CHUNK, num_stages=1):
        packed = tile + start + tl.arange(0, CHUNK)
        row = packed // GROUP
        real = row < rows
        in_tile = real[:, None] & (lane < HEAD)[None, :]
        line = (first + row) * (HKV * GROUP) + head * GROUP + packed % GROUP
        best = tl.full([CHUNK], float("-inf"), tl.float32)
        for part in tl.static_range(SPLITS):
            best = tl.maximum(best, tl.load(lse + part * lines + line, mask=real, other=float("-inf")))
        floor = tl.where(best == float("-inf"), 0.0, best)
        total, sums = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK, PADDED], tl.float32)
        for part in tl.static_range(SPLITS):
            at = part * lines + line
            weights = tl.exp2(tl.load(lse + at, mask=real, other=float("-inf")) - floor)
            values = tl.load(partial + at[:, None] * HEAD + lane[None, :], mask=in_tile, other=0.0).to(tl.float32)
            total += weights
            sums += weights[:, None] * values
        result = sums * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        store_result(out, line[:, None] * HEAD + lane[None, :], result, in_tile, scale, TYPE)


@dependent_kernel(do_not_specialize=["rows", "columns"])
def cascade_attention_kernel(
    q, k, v, k_pages, v_pages, page_table, context_len, attn_mask, starts, bounds, sinks, k_scale, v_scale, out, scale,
    partial, lse, arrived, rows, columns,
    SCALE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
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

    # Queries: the packed rows of this tile; those past T·GROUP are masked and not stored.
    packed = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = packed // GROUP
    real = row < rows
    lane = tl.arange(0, PADDED)
    in_head = lane < HEAD
    line = (first + row) * (HKV * GROUP) + head * GROUP + packed % GROUP
    in_tile = real[:, None] & in_head[None, :]
    queries = tl.load(q + line[:, None] * HEAD + lane[None, :], mask=in_tile, other=0.0)

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

    # Context: this split's share. Masked lanes load 0, so NaN in unused slots and page ids past the end are ignored.
    context = tl.load(context_len + request).to(tl.int32)
    if bounds is None:
        share = tl.cdiv(tl.cdiv(context, BLOCK_N), SPLITS) * BLOCK_N
        begin, end = split * share, tl.minimum((split + 1) * share, context)
    else:
        bound = tl.load(bounds + first + row, mask=real, other=2147483647).to(tl.int32)
        least = tl.min(bound, 0)  # of this tile's rows
        skipped = tl.minimum(least, context)
        share = tl.cdiv(tl.cdiv(context - skipped, BLOCK_N), SPLITS) * BLOCK_N
        begin = skipped + split * share
        end = tl.minimum(begin + share, context)
    seen_rows = rows
    if starts is not None:  # up to the last row of the tile, if it has one
        seen_rows = tl.where(tl.program_id(0) * BLOCK_M < rows * GROUP, tl.minimum(rows, tl.max(row, 0) + 1), 0)
        end = tl.where(seen_rows > 0, end, 0)
    # Ids of pages are read a tile ahead: copies whose addresses wait for a load of their own turn are not pipelined.
    table = page_table + request * columns
    page = _page_ids(table, begin + tl.arange(0, BLOCK_N), end, PAGE)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK_N)
        known = token < end
        inside = token.to(tl.uint32) % PAGE
        slot = ((page.to(tl.int64) * PAGE + inside) * HKV + head) * HEAD  # 64 bits: pools exceed 2^31 numbers
        at, mask = slot[:, None] + lane[None, :], known[:, None] & in_head[None, :]
        keys = _widened(tl.load(k_pages + at, mask=mask, other=0.0), key_scale, FP8, TYPE)
        values = _widened(tl.load(v_pages + at, mask=mask, other=0.0), value_scale, FP8, TYPE)
        seen = known[None, :] if bounds is None else known[None, :] & (token[None, :] - bound[:, None] >= 0)
        best, total, sums = _fold(queries, keys, values, seen, best, total, sums, SCALE, WIDEN)
        page = _page_ids(table, token + BLOCK_N, end, PAGE)

    # New rows: in the last split only, at most one mask word a row at a time. One stage: they are few, and in L2.
    words = tl.cdiv(rows, 32)
    if bounds is None or starts is None:
        passed = 0
    else:  # rows of a chunk in front of all windows
        passed = tl.maximum(tl.minimum(least - context, rows), 0) // BLOCK_T * BLOCK_T
    for start in tl.range(passed, tl.where(split == SPLITS - 1, seen_rows, 0), BLOCK_T, num_stages=STAGES):
        if starts is None:
            bits = tl.load(attn_mask + (first + row) * words + start // 32, mask=real, other=0)
        column = start + tl.arange(0, BLOCK_T)
        at = ((first + column) * HKV + head)[:, None] * HEAD + lane[None, :]
        mask = (column < rows)[:, None] & in_head[None, :]
        keys, values = tl.load(k + at, mask=mask, other=0.0), tl.load(v + at, mask=mask, other=0.0)
        if starts is None:
            seen = ((bits[:, None] >> (column % 32)[None, :]) & 1) != 0
        else:
            seen = column[None, :] - row[:, None] <= 0  # compared, they spill where registers are short
            if bounds is not None:
                seen = seen & (column[None, :] >= (bound - context)[:, None])
        best, total, sums = _fold(queries, keys, values, seen, best, total, sums, SCALE, WIDEN)

    # Store: an empty share would give 0 / 0, and NaN times the merge's weight of 0 is NaN.
    total = tl.where(total == 0.0, 1.0, total)
    result = sums * (1.0 / total)[:, None]
    if SPLITS == 1:
        store_result(out, line[:, None] * HEAD + lane[None, :], result, in_tile, scale, TYPE)
    else:
        requests = (tl.num_programs(1) // HKV).to(tl.int64)
        lines = (requests * rows if starts is None else tl.load(starts + requests)) * (HKV * GROUP)
        mine = split * lines + line
        tl.store(partial + mine[:, None] * HEAD + lane[None, :], result.to(TYPE), mask=in_tile)
        tl.store(lse + mine, best * SCALE + tl.log2(total), mask=real)
        tl.debug_barrier()  # one thread announces the stores of all
        place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(arrived + place, 1, sem="acq_rel") == SPLITS - 1:
            _merge(
                out, scale, partial, lse, tl.program_id(0) * BLOCK_M, first, head, rows, lines,
                HKV, GROUP, HEAD, PADDED, SPLITS, BLOCK_M, TYPE,
            )  # fmt: skip
            tl.store(arrived + place, 0)


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
