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


@triton.jit
def grow_kernel(
    anchor, first_tokens, first_logprob, second_tokens, second_logprob, branch_tokens, prefix_len,
    tokens, parent, depth, branch_id, valid, score, attn_mask, num_merged, scratch,
    tokens_stride, logprob_stride, slots,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (B). `tokens_stride`, `logprob_stride`: numbers from one request's first draft to the next.

    scratch: int64 [B, 4, 1 + slots·NP], of every node found: token, parent, branch, and its rank among the best.
    ROWS: parents whose children are sorted at a time.
    """
    request = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, NP)
    m = tl.arange(0, MP)[None, :]
    found = 1 + slots * NP
    node_token = scratch + request * 4 * found
    node_parent = node_token + found
    node_branch = node_parent + found
    node_rank = node_branch + found
    tl.store(node_token, tl.load(anchor + request))
    tl.store(node_parent, 0)
    tl.store(node_branch, 0)

    # The current level: scores, the draft that continues each path, its index among the nodes found.
    level_score = tl.where(n == 0, 0.0, float("-inf"))
    state = n * 0
    index = n * 0
    passed = tl.full([NP], (1 << K) - 1, tl.int64)  # a bit for each branch whose tokens the path has so far
    best = tl.where(n == 0, pack_entry(level_score, n), ABSENT)
    for d in range(slots):
        level = tl.full([NP], ABSENT, tl.int64)
        for start in range(0, NP, ROWS):
            row = start + tl.arange(0, ROWS)
            of = tl.gather(state, row, 0)[:, None]
            logprob = tl.load(
                first_logprob + request * logprob_stride + d * M + m, mask=(m < M) & (of == 0), other=float("-inf")
            )
            if K > 0:
                behind = tl.load(
                    second_logprob + ((request * K + of - 1) * slots + d) * M + m, mask=(m < M) & (of > 0),
                    other=float("-inf"),
                )  # fmt: skip
                logprob = tl.where(of > 0, behind, logprob)
            children = tl.gather(level_score, row, 0)[:, None] + logprob
            children = tl.where(m < M, children, float("-inf"))
            entries = tl.reshape(pack_entry(children, row[:, None] * MP + m), [ROWS * MP])
            level = largest(entries, NP) if ROWS == NP else merged(level, largest(entries, NP))
        place = place_of(level)
        above, candidate = place // MP, place % MP
        level_score = tl.where(n < N, score_of(level), float("-inf"))
        branch = tl.gather(state, above, 0)
        token = tl.load(
            first_tokens + request * tokens_stride + d * M + candidate, mask=(candidate < M) & (branch == 0), other=0
        )
        if K > 0:
            behind = tl.load(
                second_tokens + ((request * K + branch - 1) * slots + d) * M + candidate,
                mask=(candidate < M) & (branch > 0), other=0,
            )  # fmt: skip
            token = tl.where(branch > 0, behind, token)
        above_index = tl.gather(index, above, 0)
        index = 1 + d * NP + n
        tl.store(node_token + index, token)
        tl.store(node_parent + index, above_index)
        tl.store(node_branch + index, branch)
        best = merged(best, pack_entry(level_score, index))
        state = branch
        if K > 0:
            k = tl.arange(0, KP)[None, :]
            kept = tl.load(branch_tokens + (request * K + k) * slots + d, mask=k < K, other=-1)
            length = tl.load(prefix_len + request * K + k, mask=k < K, other=-1)
            on = ((tl.gather(passed, above, 0)[:, None] >> k) & 1) == 1
            on = on & (k < K) & (kept == token[:, None])
            passed = tl.sum(tl.where(on, tl.full([1, KP], 1, tl.int64) << k, 0), axis=1)
            entered = tl.min(tl.where(on & (length == d + 1), k, KP), axis=1)
            state = tl.where(entered < KP, entered + 1, branch)

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
