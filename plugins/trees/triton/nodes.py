"""The columns and the mask of a tree, the tree of candidates that share prefixes, and the accepted path, walked from
the root. One program serves one request.

Shape letters as in `d2sd.plugins.trees`, whose functions are the specification. Capitals with P are sizes
rounded up to powers of two.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels


@triton.jit
def mask_rows(attn_mask, row, parent, depth, valid, N: tl.constexpr, NP: tl.constexpr):
    """Rows of `attn_mask`: each valid node attends to itself and its ancestors, padding to itself.

    Padding has depth 0.
    """
    column = tl.arange(0, NP)[None, :]
    above = tl.where(valid, parent, tl.arange(0, NP))
    node = row
    seen = node[:, None] == column
    for _ in range(tl.max(depth, axis=0)):
        node = tl.gather(above, node, 0)
        seen = seen | (node[:, None] == column)
    tl.store(attn_mask + row[:, None] * N + column, seen, mask=(row[:, None] < N) & (column < N))


@triton.jit
def store_mask(attn_mask, parent, depth, valid, N: tl.constexpr, NP: tl.constexpr, TILE: tl.constexpr):
    """All rows."""
    for start in range(0, NP, TILE):
        mask_rows(attn_mask, start + tl.arange(0, TILE), parent, depth, valid, N, NP)


@triton.jit
def ancestors(above, STEPS: tl.constexpr, NP: tl.constexpr):
    """Bits of each node's ancestors and of itself, of nodes 0 .. 31 and 32 .. 63, in int32 [NP]: `above` is its parent,
    or itself; paths have at most STEPS nodes. Each turn doubles how far they see.
    """
    n = tl.arange(0, NP)
    low = tl.where(n < 32, 1 << (n & 31), 0)
    high = tl.where(n < 32, 0, 1 << (n & 31))
    for _ in tl.static_range((STEPS - 1).bit_length()):
        low |= tl.gather(low, above, 0)
        if NP > 32:
            high |= tl.gather(high, above, 0)
        above = tl.gather(above, above, 0)
    return low, high


@triton.jit
def store_ancestors(attn_mask, low, high, N: tl.constexpr, NP: tl.constexpr):
    """Rows of `attn_mask` from such bits."""
    row, bit = tl.arange(0, NP)[:, None], tl.arange(0, 32)[None, :]
    at = attn_mask + row * N + bit
    tl.store(at, ((low[:, None] >> bit) & 1) != 0, mask=(row < N) & (bit < N))
    if N > 32:
        tl.store(at + 32, ((high[:, None] >> bit) & 1) != 0, mask=(row < N) & (bit + 32 < N))


@dependent_kernel
def mask_kernel(
    parent, depth, valid, attn_mask,
    N: tl.constexpr, NP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (B, ⌈N / TILE⌉)."""
    wait_for_prior_kernels()
    request = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, NP)
    at = request * N + n
    up = tl.load(parent + at, mask=n < N, other=0).to(tl.int32)
    level = tl.load(depth + at, mask=n < N, other=0).to(tl.int32)
    real = tl.load(valid + at, mask=n < N, other=0) != 0
    start = tl.program_id(1) * TILE
    mask_rows(attn_mask + request * N * N, start + tl.arange(0, TILE), up, level, real, N, NP)


@dependent_kernel
def chain_kernel(
    candidate, path_score, tokens, parent, depth, branch_id, valid, score, attn_mask, num_merged,
    candidate_stride, score_stride,
    N: tl.constexpr, NP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (B). candidate, path_score: [B, N]."""
    wait_for_prior_kernels()
    request = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, NP)
    inside = n < N
    own = tl.load(path_score + request * score_stride + n, mask=inside, other=float("-inf"))
    real = own > float("-inf")
    token = tl.load(candidate + request * candidate_stride + n, mask=inside & real, other=0)
    at = request * N + n
    tl.store(tokens + at, token, mask=inside)
    tl.store(parent + at, tl.maximum(n - 1, 0), mask=inside)
    tl.store(depth + at, n, mask=inside)
    tl.store(branch_id + at, n * 0, mask=inside)
    tl.store(valid + at, real, mask=inside)
    tl.store(score + at, tl.where(real, own, float("-inf")), mask=inside)
    tl.store(num_merged + request, 0)
    store_mask(attn_mask + request * N * N, tl.maximum(n - 1, 0), tl.where(real, n, 0), real, N, NP, TILE)


@triton.jit
def store_candidates(
    token, path_score, owner, tokens, parent, depth, branch_id, valid, score, attn_mask, num_merged,
    C: tl.constexpr, G: tl.constexpr, CP: tl.constexpr, GP: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The tree of one request's candidates. token, path_score, owner: [CP, GP]; `owner` is the first candidate with the
    same tokens so far, which are -1 where the score is -inf: there is no node.
    """
    request = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CP)[:, None]
    g = tl.arange(0, GP)[None, :]
    proposed = (path_score > float("-inf")) & (c < C) & (g < G)
    own = (owner == c) & proposed
    tokens_of_all = tl.sum(tl.sum(proposed.to(tl.int32), axis=1), axis=0)
    in_row = tl.cumsum(own.to(tl.int32), axis=1)
    of_row = tl.sum(own.to(tl.int32), axis=1)
    index = (tl.cumsum(of_row, axis=0) - of_row)[:, None] + in_row - 1
    total = tl.sum(of_row, axis=0)
    node = tl.gather(index, owner, 0)
    above = tl.gather(node, tl.maximum(g - 1, 0) + tl.zeros([CP, GP], dtype=tl.int32), 1)
    above = tl.where(g == 0, 0, above)

    kept = own & (index < N)
    at = request * N + index
    tl.store(tokens + at, token, mask=kept)
    tl.store(parent + at, above, mask=kept)
    tl.store(depth + at, g + c * 0, mask=kept)
    tl.store(branch_id + at, c + g * 0, mask=kept)
    tl.store(score + at, path_score, mask=kept)

    n = tl.arange(0, NP)
    real = n < total
    padding = (n < N) & (n >= total)
    at = request * N + n
    tl.store(tokens + at, n * 0, mask=padding)
    tl.store(parent + at, n * 0, mask=padding)
    tl.store(depth + at, n * 0, mask=padding)
    tl.store(branch_id + at, n * 0, mask=padding)
    tl.store(score + at, tl.full([NP], float("-inf"), tl.float32), mask=padding)
    tl.store(valid + at, real, mask=n < N)
    tl.store(num_merged + request, tokens_of_all - total)

    tl.debug_barrier()  # what other threads have stored
    up = tl.load(parent + at, mask=n < N, other=0).to(tl.int32)
    levels = tl.load(depth + at, mask=n < N, other=0).to(tl.int32)
    store_mask(attn_mask + request * N * N, up, levels, real & (n < N), N, NP, TILE)


@dependent_kernel
def candidates_kernel(
    candidate, path_score, tokens, parent, depth, branch_id, valid, score, attn_mask, num_merged,
    C: tl.constexpr, G: tl.constexpr, CP: tl.constexpr, GP: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (B). candidate, path_score: [B, C, G]."""
    wait_for_prior_kernels()
    request = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CP)[:, None]
    g = tl.arange(0, GP)[None, :]
    inside = (c < C) & (g < G)
    source = request * C * G + c * G + g
    own_score = tl.load(path_score + source, mask=inside, other=float("-inf"))
    token = tl.load(candidate + source, mask=inside & (own_score > float("-inf")), other=-1)

    # The first candidate with the same prefix owns the node.
    owner = c + tl.zeros([CP, GP], dtype=tl.int32)
    for back in range(C):
        e = C - 1 - back
        at = request * C * G + e * G + g
        score_of = tl.load(path_score + at, mask=g < G, other=float("-inf"))
        other = tl.load(candidate + at, mask=(g < G) & (score_of > float("-inf")), other=-1)
        same = tl.cumsum((token != other).to(tl.int32), axis=1) == 0
        owner = tl.where(same & (c < C), e, owner)
    store_candidates(
        token, own_score, owner, tokens, parent, depth, branch_id, valid, score, attn_mask, num_merged,
        C, G, CP, GP, N, NP, TILE,
    )  # fmt: skip


@dependent_kernel
def accept_kernel(
    tokens, parent, valid, branch_id, chosen, rows, path, packed,
    N: tl.constexpr, NP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Grid (B). chosen: [B, N]; rows: [B], or None. path: [B, G]; packed: [B, 2 + G], its length, last branch and
    choices.
    """
    wait_for_prior_kernels()
    request = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, NP)
    inside = n < N
    at = request * N + n
    above = tl.load(parent + at, mask=inside, other=0).to(tl.int32)
    token = tl.load(tokens + at, mask=inside, other=0)
    agrees = inside & (n > 0) & (tl.load(valid + at, mask=inside, other=0) != 0)
    agrees = agrees & (token == tl.load(chosen + request * N + above, mask=inside, other=0))
    if rows is not None:
        agrees = agrees & (n < tl.load(rows + request))

    g = tl.arange(0, GP)
    nodes = g * 0
    last = 0
    count = 0
    node = 0
    while node < NP and count < G:
        nodes = tl.where(g == count, node, nodes)
        last = node
        count += 1
        node = tl.min(tl.where(agrees & (above == node), n, NP), axis=0)  # siblings differ: one at most
    tl.store(path + request * G + g, nodes, mask=g < G)
    choices = tl.load(chosen + request * N + nodes, mask=g < G, other=0)
    tl.store(packed + request * (2 + G) + 2 + g, choices, mask=g < G)
    tl.store(packed + request * (2 + G), count)
    tl.store(packed + request * (2 + G) + 1, tl.load(branch_id + request * N + last))
