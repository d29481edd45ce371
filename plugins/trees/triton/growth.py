"""The likeliest tree, grown level by level in one program. The specification: `d2sd.plugins.trees`.

Of equal scores the one of the better parent comes first, then the earlier candidate. A level and the best nodes of
all levels are sorted lists in registers; the other columns are stored in `scratch` until the best are known.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

from d2sd.plugins.shared.kernels import ABSENT, largest, merged, pack_entry, place_of, score_of
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
def _candidates(values, strides, request, state, slot, m, missing, slots, SOURCES: tl.constexpr, LANE: tl.constexpr):
    """Tokens of candidates `m` in a lane for paths of this state; `missing` where there are none."""
    row = _row(state, LANE)
    found = (row * 0 + m * 0).to(values[0].dtype.element_ty) + missing
    for s in tl.static_range(len(SOURCES)):
        if SOURCES[s][3] == LANE:
            k = row - 1 - SOURCES[s][0]
            inside = (k >= 0) & (k < SOURCES[s][1]) & (m >= 0) & (m < SOURCES[s][2])
            at = request * strides[s] + (k * slots + slot) * SOURCES[s][2] + m
            found = tl.where(inside, tl.load(values[s] + at, mask=inside, other=missing), found)
    return found


@triton.jit
def _logprobs(values, strides, request, state, came, slot, m, slots, SOURCES: tl.constexpr, LANE: tl.constexpr):
    """Log-probabilities of the same behind nodes that `came` from a candidate of a row: its number and the row's."""
    row = _row(state, LANE)
    found = (row * 0 + m * 0).to(tl.float32) + float("-inf")
    for s in tl.static_range(len(SOURCES)):
        if SOURCES[s][3] == LANE:
            k = row - 1 - SOURCES[s][0]
            inside = (k >= 0) & (k < SOURCES[s][1]) & (m >= 0) & (m < SOURCES[s][2])
            line = k * slots + slot
            if SOURCES[s][4] > 1:
                line = line * SOURCES[s][4] + tl.where((came & MASK) == row, came >> BITS, 0)
            at = request * strides[s] + line * SOURCES[s][2] + m
            found = tl.where(inside, tl.load(values[s] + at, mask=inside, other=float("-inf")), found)
    return found


@triton.jit
def grow_kernel(
    anchor, draft_tokens, draft_table, kept, prefix_len,
    tokens, parent, depth, branch_id, valid, score, attn_mask, num_merged, scratch,
    tokens_stride, table_stride, slots,
    SOURCES: tl.constexpr, START: tl.constexpr, SPLIT: tl.constexpr,
    MP: tl.constexpr, OFFSET: tl.constexpr, TOTAL: tl.constexpr, ROWS: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (B). Of every source: `draft_tokens`, `draft_table`, with `tokens_stride`, `table_stride` numbers from one
    request to the next; `kept` and `prefix_len` of its branches, None at the root; in SOURCES its first row, rows,
    width, lane, the parents that it keeps apart, and whether it follows; SPLIT, whether one keeps any apart. Of every
    lane: MP, its width; OFFSET, that of those before, TOTAL of all; ROWS, parents whose children are sorted at a time.

    START: the root's state. scratch: int64 [B, 4, 1 + slots·NP], of every node found: token, parent, branch, and its
    rank among the best.
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
    origin = n * 0  # the row that proposed it, and which of its candidates it is, from 1
    passed = tl.full([NP], -1, tl.int64)  # a bit for each row whose prefix the path has so far
    best = tl.where(n == 0, pack_entry(level_score, n), ABSENT)
    for d in range(slots):
        level = tl.full([NP], ABSENT, tl.int64)
        for lane in tl.static_range(len(MP)):
            m = tl.arange(0, MP[lane])[None, :]
            for start in range(0, NP, ROWS[lane]):
                place = start + tl.arange(0, ROWS[lane])
                of = tl.gather(state, place, 0)[:, None]
                came_from = tl.gather(origin, place, 0)[:, None] if SPLIT else of
                logprob = _logprobs(draft_table, table_stride, request, of, came_from, d, m, slots, SOURCES, lane)
                token = _candidates(draft_tokens, tokens_stride, request, of, d, m, -1, slots, SOURCES, lane)
                for rival in tl.static_range(len(MP)):  # of equal children the likelier one stays
                    for other in range(MP[rival] if rival != lane else 0):
                        its_token = _candidates(
                            draft_tokens, tokens_stride, request, of, d, other, -1, slots, SOURCES, rival
                        )
                        its_logprob = _logprobs(
                            draft_table, table_stride, request, of, came_from, d, other, slots, SOURCES, rival
                        )
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
        origin = n * 0
        for lane in tl.static_range(len(MP)):
            m = candidate - OFFSET[lane]
            if SPLIT:
                origin += tl.where((m >= 0) & (m < MP[lane]), ((m + 1) << BITS) + _row(came, lane), 0)
            token += _candidates(draft_tokens, tokens_stride, request, came, d, m, 0, slots, SOURCES, lane)
            branch += tl.where((m >= 0) & (m < MP[lane]), _row(came, lane) - 1, 0)
        above_index = tl.gather(index, above, 0)
        index = 1 + d * NP + n
        tl.store(node_token + index, token)
        tl.store(node_parent + index, above_index)
        tl.store(node_branch + index, branch)
        best = merged(best, pack_entry(level_score, index))
        state = came
        for s in tl.static_range(len(SOURCES)):
            if SOURCES[s][5]:  # paths that took another token leave the row
                row = _row(came, SOURCES[s][3])
                its = _candidates(draft_tokens, tokens_stride, request, came, d, 0, -1, slots, SOURCES, SOURCES[s][3])
                on = (row > SOURCES[s][0]) & (row <= SOURCES[s][0] + SOURCES[s][1])
                state -= tl.where(on & (its != token), row << (BITS * SOURCES[s][3]), 0)
        before = tl.gather(passed, above, 0)[:, None]
        passed = tl.zeros([NP], tl.int64)
        for s in tl.static_range(len(SOURCES) - 1, -1, -1):  # the first of equals is the last to enter
            if kept[s] is not None:
                k = tl.arange(0, _power(SOURCES[s][1]))[None, :]
                at = request * SOURCES[s][1] + k
                expected = tl.load(kept[s] + at * slots + d, mask=k < SOURCES[s][1], other=-1)
                length = tl.load(prefix_len[s] + at, mask=k < SOURCES[s][1], other=-1)
                row = SOURCES[s][0] + k
                on = (((before >> row) & 1) == 1) & (k < SOURCES[s][1]) & (expected == token[:, None])
                passed += tl.sum(tl.where(on, tl.full([1, 1], 1, tl.int64) << row, 0), axis=1)
                entered = tl.min(tl.where(on & (length == d + 1), row + 1, MASK + 1), axis=1)
                entering = (entered - _row(state, SOURCES[s][3])) << (BITS * SOURCES[s][3])
                state += tl.where(entered <= MASK, entering, 0)

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
