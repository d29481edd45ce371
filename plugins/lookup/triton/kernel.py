"""The search of a copy in one program, and the write of committed tokens. The specification: `d2sd.plugins.lookup`.

The launchers behind the kernels wait for nothing: a CUDA graph can capture them.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import next_power_of_2 as power

from d2sd.plugins.lookup.types import LENGTHS, LONGEST, SUPPORT, Copy
from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels
from d2sd.plugins.trees import Draft

#: Places of a text that a program compares at a time.
TILE, WARPS = 1024, 4

# Shape letters as in reference.py.


@triton.jit
def _tokens(pages, table, context_len, anchor, place, mask, PAGE: tl.constexpr):
    """Tokens of a text at `place`: of its pages, or its anchor; -1 outside `mask`."""
    committed = mask & (place < context_len)
    page = tl.load(table + place // PAGE, mask=committed, other=0)
    token = tl.load(pages + page * PAGE + place % PAGE, mask=committed, other=-1)
    return tl.where(mask & (place == context_len), anchor, token)


@dependent_kernel(do_not_specialize=["columns"])
def copy_kernel(
    pages, page_table, context_len, anchor, first_tokens, first_logprob, scores, temperature,
    tokens, length, logprob, columns,
    S: tl.constexpr, SP: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    LONGEST: tl.constexpr, LENGTHS: tl.constexpr, SUPPORT: tl.constexpr,
):  # fmt: skip
    """Grid (B). WIDTH: candidates a slot of the draft; TILE: places of the text compared at a time."""
    wait_for_prior_kernels()
    request = tl.program_id(0).to(tl.int64)
    end = tl.load(context_len + request).to(tl.int32)  # the anchor's place
    last = tl.load(anchor + request)
    table = page_table + request * columns

    # The longest match, of equals the latest: its length above its place in one number.
    best = tl.full([], 0, tl.int64)
    for start in range(0, end, TILE):
        place = start + tl.arange(0, TILE)
        alive = (place < end) & (_tokens(pages, table, end, last, place, place < end, PAGE) == last)
        matched = alive.to(tl.int64)
        back = 1
        while (back < LONGEST) & (tl.max(alive.to(tl.int64), axis=0) > 0):
            there = _tokens(pages, table, end, last, end - back, back <= end, PAGE)
            alive = alive & (place >= back)
            alive = alive & (_tokens(pages, table, end, last, place - back, alive, PAGE) == there)
            matched += alive.to(tl.int64)
            back += 1
        best = tl.maximum(best, tl.max(tl.where(matched > 0, (matched << 32) | place, 0), axis=0))
    matched = (best >> 32).to(tl.int32)
    at = (best & 0xFFFFFFFF).to(tl.int32)

    # Its continuation, and what the draft thinks of it.
    slot = tl.arange(0, SP)
    inside = (slot < S) & (matched > 0)
    token = _tokens(pages, table, end, last, at + 1 + slot % tl.maximum(end - at, 1), inside, PAGE)
    token = tl.where(inside, token, 0)
    known = tl.full([SP], float("-inf"), tl.float32)
    for m in range(WIDTH):
        candidate = (request * S + slot) * WIDTH + m
        same = tl.load(first_tokens + candidate, mask=inside, other=-1) == token
        known = tl.maximum(known, tl.load(first_logprob + candidate, mask=inside & same, other=float("-inf")))
    support = (known > float("-inf")).to(tl.int32)
    for n in tl.static_range(len(SUPPORT)):
        support += (known > SUPPORT[n]).to(tl.int32)
    entry = tl.full([], 0, tl.int32)
    for n in tl.static_range(1, len(LENGTHS)):
        entry += (matched >= LENGTHS[n]).to(tl.int32)
    row = (entry * (len(SUPPORT) + 2) + support) * S + slot
    greedy = tl.load(scores + row, mask=inside, other=0.0)
    sampled = tl.load(scores + len(LENGTHS) * (len(SUPPORT) + 2) * S + row, mask=inside, other=0.0)
    weight = tl.minimum(tl.maximum(tl.load(temperature + request), 0.0), 1.0)
    score = greedy + weight * (sampled - greedy)
    tl.store(tokens + request * S + slot, token, mask=slot < S)
    tl.store(logprob + request * S + slot, tl.where(inside, score, float("-inf")), mask=slot < S)
    tl.store(length + request, matched.to(tl.int64))


@dependent_kernel(do_not_specialize=["columns", "nodes", "count_stride"])
def append_kernel(
    pages, page_table, context_len, node_tokens, path, count, active, columns, nodes, count_stride,
    G: tl.constexpr, GP: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid (B): write the tokens of each accepted path [B, G] behind the committed ones."""
    wait_for_prior_kernels()
    request = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, GP)
    kept = (step < tl.load(count + request * count_stride)) & (step < G) & (tl.load(active + request) != 0)
    node = tl.load(path + request * G + step, mask=kept, other=0)
    token = tl.load(node_tokens + request * nodes + node, mask=kept, other=0)
    place = tl.load(context_len + request) + step
    kept = kept & (place // PAGE < columns)
    page = tl.load(page_table + request * columns + place // PAGE, mask=kept, other=0)
    tl.store(pages + page * PAGE + place % PAGE, token, mask=kept)


def find_copy(text, first, scores, temperature):
    batch, slots, width = first.tokens.shape
    tokens, logprob = first.tokens.new_empty(batch, slots, 1), first.logprob.new_empty(batch, slots, 1)
    copy = Copy(Draft(tokens, logprob), torch.empty_like(text.context_len))
    with torch.cuda.device_of(text.pages):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        copy_kernel[(batch,)](
            text.pages,
            text.page_table.contiguous(),
            text.context_len,
            text.anchor,
            first.tokens.contiguous(),
            first.logprob.contiguous(),
            scores.table,
            temperature,
            tokens,
            copy.length,
            logprob,
            text.page_table.shape[1],
            S=slots,
            SP=power(slots),
            WIDTH=width,
            PAGE=text.pages.shape[1],
            TILE=TILE,
            LONGEST=LONGEST,
            LENGTHS=LENGTHS,
            SUPPORT=SUPPORT,
            num_warps=WARPS,
        )
    return copy


def append(text, tokens, accepted, active):
    batch, size = accepted.path.shape
    with torch.cuda.device_of(text.pages):  # type: ignore[no-untyped-call]
        append_kernel[(batch,)](
            text.pages,
            text.page_table.contiguous(),
            text.context_len,
            tokens.contiguous(),
            accepted.path.contiguous(),
            accepted.count,
            active,
            text.page_table.shape[1],
            tokens.shape[1],
            accepted.count.stride(0),
            G=size,
            GP=power(size),
            PAGE=text.pages.shape[1],
            num_warps=1,
        )
