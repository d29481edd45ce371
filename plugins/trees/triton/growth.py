"""The likeliest tree, grown level by level in one program. The specification: `d2sd.plugins.trees`.

Of equal scores the one of the better parent comes first, then the earlier candidate. A level and the best nodes of
all levels are sorted lists in registers; the other columns are stored in `scratch` until the best are known.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

from d2sd.plugins.shared.order import ABSENT, largest, merged, pack_entry, place_of, score_of
from d2sd.plugins.trees.triton.nodes import store_mask

#: Bits of a row's number in the state of a path, which has one number a lane.
BITS = tl.constexpr(6)
MASK = tl.constexpr(63)


@triton.constexpr_function
def _power(size):
    return 1 << (size - 1).bit_length()


@triton.jit
def _row(state, lane: tl.constexpr):
    """The row that continues a path in a lane, from 1; 0: none."""
    return (state >> (BITS * lane)) & MASK


@triton.jit
def _candidates(
    values, strides, request, row, slot, m, missing, slots,
    FIRST: tl.constexpr, COUNTS: tl.constexpr, WIDTHS: tl.constexpr, LANES: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Candidates `m` of rows of a lane; `missing` where there are none."""
    found = (row * 0 + m * 0).to(values[0].dtype.element_ty) + missing
    for s in tl.static_range(len(LANES)):
        if LANES[s] == LANE:
            k = row - 1 - FIRST[s]
            inside = (k >= 0) & (k < COUNTS[s]) & (m < WIDTHS[s])
            at = request * strides[s] + (k * slots + slot) * WIDTHS[s] + m
            found = tl.load(values[s] + at, mask=inside, other=missing) if len(LANES) == 1 else tl.where(
                inside, tl.load(values[s] + at, mask=inside, other=missing), found
            )  # fmt: skip
    return found


@triton.jit
def grow_kernel(
    anchor, draft_tokens, draft_logprob, kept, prefix_len,
    tokens, parent, depth, branch_id, valid, score, attn_mask, num_merged, scratch,
    tokens_stride, logprob_stride, slots,
    FIRST: tl.constexpr, COUNTS: tl.constexpr, WIDTHS: tl.constexpr, LANES: tl.constexpr, START: tl.constexpr,
    MP: tl.constexpr, OFFSET: tl.constexpr, TOTAL: tl.constexpr, ROWS: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (B). Of every source: `draft_tokens`, `draft_logprob`, with `tokens_stride`, `logprob_stride` numbers from
    one request to the next; `kept` and `prefix_len` of its branches, None at the root; FIRST, COUNTS: its rows; WIDTHS,
    LANES. Of every lane: MP, the width; OFFSET, the lanes before, all TOTAL; ROWS, parents sorted at a time.

    START: the state of the root. scratch: int64 [B, 4, 1 + slots·NP], of every node found: token, parent, branch, and
    its rank among the best.
    """
    request = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, NP)
    found = 1 + slots * NP
    node_token = scratch + request * 4 * found
    node_parent = node_token + found
    node_branch = node_parent + found
    node_rank = node_branch + found
    tl.store(node_token, tl.load(anchor + request))
    tl.store(node_parent, 0)
    tl.store(node_branch, 0)

    # The current level: scores, the rows that continue each path, its index among the nodes found.
    level_score = tl.where(n == 0, 0.0, float("-inf"))
    state = n * 0 + START
    index = n * 0
    passed = tl.full([NP], -1, tl.int64)  # a bit for each row whose prefix the path has so far
    best = tl.where(n == 0, pack_entry(level_score, n), ABSENT)
    for d in range(slots):
        level = tl.full([NP], ABSENT, tl.int64)
        for lane in tl.static_range(len(MP)):
            m = tl.arange(0, MP[lane])[None, :]
            for start in range(0, NP, ROWS[lane]):
                place = start + tl.arange(0, ROWS[lane])
                of = tl.gather(state, place, 0)[:, None]
                logprob = _candidates(
                    draft_logprob, logprob_stride, request, _row(of, lane), d, m, float("-inf"), slots,
                    FIRST, COUNTS, WIDTHS, LANES, lane,
                )  # fmt: skip
                if len(MP) > 1:  # of equal children the likelier one stays
                    token = _candidates(
                        draft_tokens, tokens_stride, request, _row(of, lane), d, m, -1, slots,
                        FIRST, COUNTS, WIDTHS, LANES, lane,
                    )  # fmt: skip
                    for rival in tl.static_range(len(MP)):
                        if rival != lane:
                            for candidate in range(MP[rival]):
                                its_token = _candidates(
                                    draft_tokens, tokens_stride, request, _row(of, rival), d, candidate, -1, slots,
                                    FIRST, COUNTS, WIDTHS, LANES, rival,
                                )  # fmt: skip
                                its_logprob = _candidates(
                                    draft_logprob, logprob_stride, request, _row(of, rival), d, candidate,
                                    float("-inf"), slots, FIRST, COUNTS, WIDTHS, LANES, rival,
                                )  # fmt: skip
                                loses = its_logprob > logprob if lane < rival else (logprob > its_logprob) == 0
                                logprob = tl.where((its_token == token) & loses, float("-inf"), logprob)
                children = tl.where(m < MP[lane], tl.gather(level_score, place, 0)[:, None] + logprob, float("-inf"))
                entries = pack_entry(children, place[:, None] * TOTAL + OFFSET[lane] + m)
                entries = largest(tl.reshape(entries, [ROWS[lane] * MP[lane]]), NP)
                level = entries if lane == 0 and ROWS[lane] == NP else merged(level, entries)
        place = place_of(level)
        above, candidate = place // TOTAL, place % TOTAL
        level_score = tl.where(n < N, score_of(level), float("-inf"))
        came = tl.gather(state, above, 0)
        token = tl.zeros([NP], tl.int64)
        branch = n * 0
        for lane in tl.static_range(len(MP)):
            here = (candidate >= OFFSET[lane]) & (candidate < OFFSET[lane] + MP[lane])
            row = tl.where(here, _row(came, lane), 0)
            proposed = _candidates(
                draft_tokens, tokens_stride, request, row, d, candidate - OFFSET[lane], 0, slots,
                FIRST, COUNTS, WIDTHS, LANES, lane,
            )  # fmt: skip
            token = tl.where(here, proposed, token)
            branch = tl.where(here, row - 1, branch)
        above_index = tl.gather(index, above, 0)
        index = 1 + d * NP + n
        tl.store(node_token + index, token)
        tl.store(node_parent + index, above_index)
        tl.store(node_branch + index, branch)
        best = merged(best, pack_entry(level_score, index))
        state = came
        before = tl.gather(passed, above, 0)[:, None]
        passed = tl.zeros([NP], tl.int64)
        for s in tl.static_range(len(LANES) - 1, -1, -1):  # the first of equals is the last to enter
            if kept[s] is not None:
                k = tl.arange(0, _power(COUNTS[s]))[None, :]
                at = request * COUNTS[s] + k
                expected = tl.load(kept[s] + at * slots + d, mask=k < COUNTS[s], other=-1)
                length = tl.load(prefix_len[s] + at, mask=k < COUNTS[s], other=-1)
                on = ((before >> (FIRST[s] + k)) & 1) == 1
                on = on & (k < COUNTS[s]) & (expected == token[:, None])
                passed += tl.sum(tl.where(on, tl.full([1, 1], 1, tl.int64) << (FIRST[s] + k), 0), axis=1)
                entered = tl.min(tl.where(on & (length == d + 1), k, COUNTS[s]), axis=1)
                entering = (entered + 1 + FIRST[s] - _row(state, LANES[s])) << (BITS * LANES[s])
                state += tl.where(entered < COUNTS[s], entering, 0)

    place = place_of(best)
    own = score_of(best)
    real = (own > float("-inf")) & (n < N)
    inside = n < N
    tl.store(node_rank + place, n, mask=real)
    tl.debug_barrier()  # what other threads have stored
    up = tl.load(node_rank + tl.load(node_parent + place, mask=real, other=0), mask=real, other=0).to(tl.int32)
    level = tl.where(real & (place > 0), (place - 1) // NP + 1, 0)
    at = request * N + n
    tl.store(tokens + at, tl.load(node_token + place, mask=real, other=0), mask=inside)
    tl.store(parent + at, up, mask=inside)
    tl.store(depth + at, level, mask=inside)
    tl.store(branch_id + at, tl.load(node_branch + place, mask=real, other=0), mask=inside)
    tl.store(valid + at, real, mask=inside)
    tl.store(score + at, tl.where(real, own, float("-inf")), mask=inside)
    tl.store(num_merged + request, 0)
    store_mask(attn_mask + request * N * N, up, level, real, N, NP, TILE)
