"""The likeliest tree, grown best first by one warp a request, or four if it is large. The specification:
`d2sd.plugins.trees`.

    a turn      the best of the frontier becomes node i; its parent p offers its next best child, node i its best one

    frontier    [NP]    of each node the best child that is not taken yet: its score, place and paths, in registers
    keys, infos [N, P]  the same of all children of each node, in memory: what a thread reads there it has stored
                        itself, or another warp, before a barrier

A place says which of equal scores comes first: the one of the upper level, then of the better parent, then the earlier
candidate. Scores are compared as integers of the same order, so that a reduction of a warp is one instruction: one
finds the best score, one the first place with it. No score is above its parent's, so nodes are found in their order,
and the search stops at the last.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels
from d2sd.plugins.shared.kernels import value_of
from d2sd.plugins.trees.triton.nodes import ancestors, store_ancestors
from d2sd.plugins.trees.types import ROW_BITS

#: Bits of a row's number in the state of a path, which has one number a lane.
BITS = tl.constexpr(ROW_BITS)
MASK = tl.constexpr(63)
#: In the order of scores: -inf, and less than any score.
NOTHING = tl.constexpr(0x807FFFFF - (1 << 32))
LEAST = tl.constexpr(-(1 << 31))
#: No place.
LAST = tl.constexpr((1 << 31) - 1)


@triton.constexpr_function
def _log(size):
    return size.bit_length() - 1


@triton.constexpr_function
def _ones(bits):
    return (1 << bits) - 1


@triton.jit
def _order(score):
    """int32 in the order of scores, none of which is -0.0; `value_of` is the inverse."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _row(state, lane: tl.constexpr):
    """The row that continues a path in a lane, from 1; 0: none."""
    return ((state >> (BITS * lane)) & MASK).to(tl.int32)


@triton.jit
def _bits(state):
    """The lowest bit of each number, which is not 0."""
    lowest = (state & (-state)).to(tl.float32)
    return ((lowest.to(tl.int32, bitcast=True) >> 23) & 255) - 127


@triton.constexpr_function
def _parts(numbers, most):
    return [(start, 1 << (min(most, numbers - start) - 1).bit_length()) for start in range(0, numbers, most)]


@triton.jit
def _fetched(values, count, SECTOR: tl.constexpr, MOST: tl.constexpr):
    """0.0, when a number of each 32 bytes of `count` numbers, MOST at most, has come: the others are then near."""
    zero = 0.0
    for part in tl.static_range(len(_parts(MOST // SECTOR, 512))):
        at = (_parts(MOST // SECTOR, 512)[part][0] + tl.arange(0, _parts(MOST // SECTOR, 512)[part][1])) * SECTOR
        some = tl.load(values + at, mask=at < count, other=0).to(tl.float32)
        zero += tl.max(tl.maximum(some, -1.0), axis=0) * 0.0
    return zero


@triton.jit
def _children(
    tokens, table, tokens_stride, table_stride, request, state, came, rank, slot, slots, c,
    SOURCES: tl.constexpr, OFFSET: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Tokens int32 and log-probabilities of the candidates `c` of a path of this state, in one lane or (-1) in all, at
    a slot; behind the candidate `rank`, from 1, of the row `came`. -1 and -inf where there are none.
    """
    token = tl.zeros(c.shape, tl.int32) - 1
    logprob = tl.zeros(c.shape, tl.float32) + float("-inf")
    for s in tl.static_range(len(SOURCES)):
        if LANE == -1 or SOURCES[s][3] == LANE:
            row = _row(state, SOURCES[s][3])
            k = row - 1 - SOURCES[s][0]
            m = c - OFFSET[SOURCES[s][3]]
            inside = (m >= 0) & (m < SOURCES[s][2]) & (k >= 0) & (k < SOURCES[s][1]) & (slot < slots)
            line = k * slots + slot
            at = request * tokens_stride[s] + (line * SOURCES[s][2] + m)
            token = tl.where(inside, tl.load(tokens[s] + at, mask=inside).to(tl.int32), token)
            if SOURCES[s][4] > 1:
                line = line * SOURCES[s][4] + tl.where(came == row, rank, 0)
            at = request * table_stride[s] + (line * SOURCES[s][2] + m)
            logprob = tl.where(inside, tl.load(table[s] + at, mask=inside), logprob)
    return token, logprob


@triton.jit
def _merged(
    token, logprob, tokens, table, tokens_stride, table_stride, request, state, came, rank, slot, slots, c,
    SOURCES: tl.constexpr, OFFSET: tl.constexpr, MP: tl.constexpr, ONE: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """Log-probabilities without the children of two lanes that the other one finds likelier; of equals the later lane's
    goes. OTHER, the narrower one, is read candidate by candidate. Also which of the later lane ought to go and may be
    left: each stands behind its equal, so none of them is the best.
    """
    found = logprob
    gone = c < 0
    beside = (c >= OFFSET[ONE]) & (c < OFFSET[ONE] + MP[ONE])
    for m in range(MP[OTHER]):
        x = OFFSET[OTHER] + m
        its_token, its = _children(
            tokens, table, tokens_stride, table_stride, request, state, came, rank, slot, slots,
            x + tl.arange(0, 1), SOURCES, OFFSET, OTHER,
        )  # fmt: skip
        same = beside & (token == its_token)
        wins = its > logprob if OTHER > ONE else (logprob > its) == 0
        lost = tl.max((same & (wins == 0)).to(tl.int32), axis=0) > 0
        gone = gone | ((c == x) & lost)
        found = tl.where(same & wins, float("-inf"), found)
    if OTHER < ONE:
        found = tl.where(gone, float("-inf"), found)
    return found, gone


@triton.jit
def _paths(
    token, tokens, table, tokens_stride, table_stride, kept, request, state, passed, ending, slot, slots, c,
    SOURCES: tl.constexpr, OFFSET: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The state of the paths of children with these tokens, and a bit for each row whose prefix they have so far.
    `ending`: bits of the rows whose prefix ends at this slot. LANES: bits of the rows of each.
    """
    WORD: tl.constexpr = passed.dtype
    states = state + (c * 0).to(WORD)
    for s in tl.static_range(len(SOURCES)):
        if SOURCES[s][5]:  # paths that took another token leave the row
            row = _row(state, SOURCES[s][3])
            its, _ = _children(
                tokens, table, tokens_stride, table_stride, request, state, row, 0, slot, slots,
                OFFSET[SOURCES[s][3]] + tl.arange(0, 1), SOURCES, OFFSET, SOURCES[s][3],
            )  # fmt: skip
            on = (row > SOURCES[s][0]) & (row <= SOURCES[s][0] + SOURCES[s][1])
            states -= tl.where(on & (its != token), row.to(WORD) << (BITS * SOURCES[s][3]), 0)
    has = (c * 0).to(WORD)
    one = tl.full([1], 1, WORD)
    for s in tl.static_range(len(SOURCES)):
        if kept[s] is not None:
            for k in range(SOURCES[s][1]):
                at = (request * SOURCES[s][1] + k) * slots + slot
                expected = tl.load(kept[s] + at, mask=slot < slots, other=-1).to(tl.int32)
                has |= tl.where(token == expected, one << (SOURCES[s][0] + k), 0)
    has &= passed
    for lane in tl.static_range(len(LANES)):
        enters = has & ending & LANES[lane]  # the first of several
        number = (_bits(enters) + 1).to(WORD) << (BITS * lane)
        states = tl.where(enters != 0, states - (_row(states, lane).to(WORD) << (BITS * lane)) + number, states)
    return states, has


@triton.jit
def grown(
    draft_tokens, draft_table, kept, prefix_len, keys, infos, request, tokens_stride, table_stride, slots,
    SOURCES: tl.constexpr, START: tl.constexpr, MOVES: tl.constexpr, WORD: tl.constexpr,
    MP: tl.constexpr, OFFSET: tl.constexpr, LANES: tl.constexpr, P: tl.constexpr, DP: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The best nodes of one request [NP], in their order: scores as integers, places, and the rows that proposed them,
    from 1; and how many they are.

    Of every source: `draft_tokens`, `draft_table`, with `tokens_stride`, `table_stride` numbers from one request to the
    next; `kept` and `prefix_len` of its branches, None at the root; in SOURCES its first row, rows, width, lane, the
    parents that it keeps apart, and whether it follows. Of every lane: MP, its width; OFFSET, that of those before;
    LANES, bits of the rows that enter it. P: candidates of all lanes. START: the root's state; MOVES, whether another
    one has another. DP > slots.

    keys int32, infos WORD [B, N, P]: the latter are states, the row that proposed, and bits of prefixes.
    """
    ROW: tl.constexpr = BITS * len(MP)
    PARENT: tl.constexpr = _log(P)
    LEVEL: tl.constexpr = _log(NP * P)
    n = tl.arange(0, NP)
    c = tl.arange(0, P)
    of_row = request.to(tl.int64) * (N * P) + c

    # Bits of the rows whose prefix ends behind each depth.
    depth = tl.arange(0, DP)
    ends = tl.zeros([DP], WORD)
    if MOVES:
        one = tl.full([1], 1, WORD)
        for s in tl.static_range(len(SOURCES)):
            if kept[s] is not None:
                for k in range(SOURCES[s][1]):
                    length = tl.load(prefix_len[s] + request * SOURCES[s][1] + k).to(tl.int32)
                    ends |= tl.where(depth == length, one << (SOURCES[s][0] + k), 0)

    front = tl.full([NP], LEAST, tl.int32)
    front_place = tl.full([NP], LAST, tl.int32)
    front_info = tl.zeros([NP], WORD)
    found = tl.full([NP], LEAST, tl.int32)
    found_place = tl.zeros([NP], tl.int32)
    found_row = tl.zeros([NP], tl.int32)

    # All that may be read of the drafts is fetched at once, and not when a node asks for it.
    zero = 0.0
    for s in tl.static_range(len(SOURCES)):
        numbers = slots * (SOURCES[s][1] * SOURCES[s][2])
        zero += _fetched(
            draft_table[s] + request * table_stride[s],
            numbers * SOURCES[s][4],
            8,
            DP * SOURCES[s][1] * SOURCES[s][2] * SOURCES[s][4],
        )
        if infos is not None:
            zero += _fetched(
                draft_tokens[s] + request * tokens_stride[s], numbers, 4, DP * SOURCES[s][1] * SOURCES[s][2]
            )

    best = _order(zero)  # of 0.0
    place = 0
    info = (request * 0).to(WORD) - _ones(ROW + BITS) - 1 + START
    count = 0
    while (count < N) & (best > NOTHING):
        level, p, candidate = place >> LEVEL, (place >> PARENT) & (NP - 1), place & (P - 1)
        state = info & _ones(ROW) if MOVES else START
        came = _row(info, len(MP)) if infos is not None else START
        found = tl.where(n == count, best, found)
        found_place = tl.where(n == count, place, found_place)
        found_row = tl.where(n == count, came, found_row)

        # The next best child of its parent.
        if WARPS > 1:
            tl.debug_barrier()
        at = of_row + p * P
        others = tl.load(keys + at, mask=c + count * P >= P, other=LEAST)
        rest = tl.where((others < best) | ((others == best) & (c > candidate)), others, LEAST)
        next_best = tl.max(rest, axis=0)
        next_c = tl.min(tl.where(rest == next_best, c, P - 1), axis=0)
        next_info = info
        if infos is not None:
            their = tl.load(infos + at, mask=c + count * P >= P, other=0)
            next_info = tl.sum(tl.where(c == next_c, their, 0), axis=0).to(WORD)

        # Its children.
        rank = candidate + 1
        for lane in tl.static_range(1, len(MP)):
            rank = tl.where(candidate >= OFFSET[lane], candidate + 1 - OFFSET[lane], rank)
        token, logprob = _children(
            draft_tokens, draft_table, tokens_stride, table_stride, request, state, came, rank, level, slots, c,
            SOURCES, OFFSET, -1,
        )  # fmt: skip
        alone, gone = logprob, c < 0
        for lane in tl.static_range(len(MP)):
            for other in tl.static_range(lane + 1, len(MP)):
                merged, also = _merged(
                    token, alone, draft_tokens, draft_table, tokens_stride, table_stride, request, state, came, rank,
                    level, slots, c, SOURCES, OFFSET, MP,
                    lane if MP[other] <= MP[lane] else other, other if MP[other] <= MP[lane] else lane,
                )  # fmt: skip
                logprob, gone = tl.where(merged == float("-inf"), merged, logprob), gone | also
        own = _order(value_of(best) + logprob)
        tl.store(keys + (of_row + count * P), tl.where(gone, NOTHING, own))
        child = tl.max(own, axis=0)
        child_c = tl.min(tl.where(own == child, c, P - 1), axis=0)
        child_info = info
        if infos is not None:
            if MOVES:
                ending = tl.sum(tl.where(depth == level + 1, ends, 0), axis=0).to(WORD)
                states, has = _paths(
                    token, draft_tokens, draft_table, tokens_stride, table_stride, kept, request, state,
                    info >> (ROW + BITS), ending, level, slots, c, SOURCES, OFFSET, LANES,
                )  # fmt: skip
                said = states | (has << (ROW + BITS))
            else:
                said = (c * 0).to(WORD)
            row = c * 0
            for lane in tl.static_range(len(MP)):
                row = tl.where(c >= OFFSET[lane], _row(state, lane), row)
            said |= row.to(WORD) << ROW
            tl.store(infos + (of_row + count * P), said)
            child_info = tl.sum(tl.where(c == child_c, said, 0), axis=0).to(WORD)

        is_child, is_next = n == count, (n == p) & (n != count)
        front = tl.where(is_child, child, tl.where(is_next, next_best, front))
        of_child = ((level + 1) << LEVEL) + (count << PARENT) + child_c
        of_next = place - candidate + next_c
        front_place = tl.where(is_child, of_child, tl.where(is_next, of_next, front_place))
        best = tl.max(front, axis=0)
        place = tl.min(tl.where(front == best, front_place, LAST), axis=0)
        if infos is not None:
            front_info = tl.where(is_child, child_info, tl.where(is_next, next_info, front_info))
            info = tl.sum(tl.where(front == best, front_info, 0), axis=0).to(WORD)
            if tl.sum((front == best).to(tl.int32), axis=0) > 1:  # rare; no other way has to wait for the place
                info = tl.sum(tl.where(front_place == place, front_info, 0), axis=0).to(WORD)
        count += 1
    return found, found_place, found_row, count


@triton.jit
def _tokens(draft_tokens, tokens_stride, anchor, request, place, row, real, slots, SOURCES: tl.constexpr,
            OFFSET: tl.constexpr, P: tl.constexpr, NP: tl.constexpr):  # fmt: skip
    """Tokens int64 of nodes with these places and rows; 0 where there is none."""
    level, candidate = place >> _log(NP * P), place & (P - 1)
    token = tl.where(real & (level == 0), tl.load(anchor + request), tl.zeros([NP], tl.int64))
    for s in tl.static_range(len(SOURCES)):
        k = row - 1 - SOURCES[s][0]
        inside = real & (level > 0) & (k >= 0) & (k < SOURCES[s][1])
        at = (k * slots + level - 1) * SOURCES[s][2] + candidate - OFFSET[SOURCES[s][3]]
        token = tl.where(
            inside, tl.load(draft_tokens[s] + request * tokens_stride[s] + at, mask=inside, other=0), token
        )
    return token


@dependent_kernel
def grow_kernel(
    anchor, draft_tokens, draft_table, kept, prefix_len,
    tokens, parent, depth, branch_id, valid, score, attn_mask, num_merged, keys, infos,
    tokens_stride, table_stride, slots,
    SOURCES: tl.constexpr, START: tl.constexpr, MOVES: tl.constexpr, WORD: tl.constexpr,
    MP: tl.constexpr, OFFSET: tl.constexpr, LANES: tl.constexpr, P: tl.constexpr, DP: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (B). See `grown`. A tree of more nodes than a word of 64 has bits gets its mask from `mask_kernel`."""
    wait_for_prior_kernels()
    request = tl.program_id(0).to(tl.int64)
    own, place, row, count = grown(
        draft_tokens, draft_table, kept, prefix_len, keys, infos, request, tokens_stride, table_stride, slots,
        SOURCES, START, MOVES, WORD, MP, OFFSET, LANES, P, DP, N, NP, WARPS,
    )  # fmt: skip
    n = tl.arange(0, NP)
    inside, real = n < N, n < count
    level = tl.where(real, place >> _log(NP * P), 0)
    up = tl.where(real, (place >> _log(P)) & (NP - 1), 0)
    token = _tokens(draft_tokens, tokens_stride, anchor, request, place, row, real, slots, SOURCES, OFFSET, P, NP)
    at = request * N + n
    tl.store(tokens + at, token, mask=inside)
    tl.store(parent + at, up, mask=inside)
    tl.store(depth + at, level, mask=inside)
    tl.store(branch_id + at, tl.where(real & (n > 0), row - 1, 0), mask=inside)
    tl.store(valid + at, real, mask=inside)
    tl.store(score + at, tl.where(real, value_of(own), float("-inf")), mask=inside)
    tl.store(num_merged + request, 0)
    if NP <= 64:
        low, high = ancestors(tl.where(real, up, n), DP, NP)
        store_ancestors(attn_mask + request * N * N, low, high, N, NP)
