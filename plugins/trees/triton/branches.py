"""Branches of a first draft: where they restart, what the second pass is given, and the tree of both drafts.

The specifications: `chain_branches`, `tree_branches`, `restart_blocks` and `merged_branches` of `d2sd.plugins.trees`.
Sums of log-probabilities are fp64, as PyTorch's on a CPU.
Shape letters as there: B requests, K branches, S slots after the anchor; capitals with P are powers of two.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from d2sd.plugins.shared.dependent_launch import dependent_kernel, wait_for_prior_kernels
from d2sd.plugins.shared.kernels import ABSENT, largest, pack_entry, place_of
from d2sd.plugins.trees.triton.nodes import store_candidates


@triton.jit
def _precise_exp(x):
    return libdevice.exp(x)


@triton.jit
def _precise_expm1(x):
    return libdevice.expm1(x)


@triton.jit
def _precise_log(x):
    return tl.log(x)


@triton.jit
def _rounded_exp(x):
    return tl.exp(x.to(tl.float64)).to(tl.float32)


@triton.jit
def _rounded_expm1(x):
    """Kahan's: the rounding of e^x and that of its logarithm cancel. Below -1/2 nothing does."""
    x = x.to(tl.float64)
    power = tl.exp(x)
    near = (power - 1.0) * x / tl.log(tl.where(power == 1.0, 2.0, tl.maximum(power, 0.5)))
    return tl.where(x < -0.5, power - 1.0, tl.where(power == 1.0, x, near)).to(tl.float32)


@triton.jit
def _rounded_log(x):
    return tl.log(x.to(tl.float64)).to(tl.float32)


#: Those of CUDA's and PyTorch's fp32. The interpreter has neither; its own are rounded once.
exp = _rounded_exp if triton.knobs.runtime.interpret else _precise_exp
expm1 = _rounded_expm1 if triton.knobs.runtime.interpret else _precise_expm1
log = _rounded_log if triton.knobs.runtime.interpret else _precise_log


@dependent_kernel
def boundaries_kernel(
    top1,
    confidence,
    prefix_len,
    rejected,
    top1_stride,
    confidence_stride,
    S: tl.constexpr,
    SP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
):
    """Grid (B). top1, confidence: [B, S]; prefix_len, rejected: [B, K], K at most S."""
    wait_for_prior_kernels()
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SP)
    before = (i > 0) & (i < S)
    passed = tl.load(confidence + request * confidence_stride + i - 1, mask=before, other=0.0)
    reached = exp(tl.cumsum(passed.to(tl.float64), axis=0).to(tl.float32))
    here = tl.load(confidence + request * confidence_stride + i, mask=i < S, other=0.0).to(tl.float32)
    best = largest(tl.where(i < S, pack_entry(reached * -expm1(here), i), ABSENT), KP)
    length = place_of(best)
    k = tl.arange(0, KP)
    inside = k < K
    token = tl.load(top1 + request * top1_stride + length, mask=inside)
    tl.store(prefix_len + request * K + k, length, mask=inside)
    tl.store(rejected + request * K + k, token, mask=inside)


@dependent_kernel
def restarts_kernel(
    tokens, depth, valid, score, attn_mask, top1, confidence, kept, prefix_len, rejected,
    top1_stride, top1_slot, confidence_stride, confidence_slot,
    S: tl.constexpr, SP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Grid (B). A tree [B, N] grown from top1, confidence [B, S] without the last slot; kept: tokens [B, K, S];
    prefix_len, rejected: [B, K].
    """
    wait_for_prior_kernels()
    request = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, NP)
    inside = n < N
    token = tl.load(tokens + request * N + n, mask=inside, other=0)
    level = tl.load(depth + request * N + n, mask=inside, other=0).to(tl.int32)
    usable = inside & (tl.load(valid + request * N + n, mask=inside, other=0) != 0) & (level > 0)
    drafted = tl.load(top1 + request * top1_stride + (level - 1) * top1_slot, mask=inside & (level > 0), other=0)
    differs = ((level > 0) & (token != drafted)).to(tl.int32)
    ancestors = attn_mask + request * N * N
    seen = tl.load(ancestors + n[:, None] * N + n[None, :], mask=inside[:, None] & inside[None, :], other=0) != 0
    on_chain = tl.max(tl.where(seen, differs[None, :], 0), axis=1) == 0
    behind = tl.minimum(level, S - 1) * confidence_slot
    next_one = tl.load(confidence + request * confidence_stride + behind).to(tl.float32)
    own = tl.load(score + request * N + n, mask=inside, other=0.0)
    own += tl.where(on_chain, log(-expm1(tl.minimum(next_one, -1e-7))), 0.0)
    own = tl.where(usable, own, float("-inf"))
    node = place_of(largest(tl.where(inside, pack_entry(own, n), ABSENT), KP))

    k = tl.arange(0, KP)
    chosen = node[:, None] == n[None, :]
    reached = tl.sum(tl.where(chosen, level[None, :], 0), axis=1)
    is_usable = tl.sum((chosen & usable[None, :]).to(tl.int32), axis=1) > 0
    tl.store(prefix_len + request * K + k, tl.where(is_usable, reached, S).to(tl.int64), mask=k < K)
    tl.store(rejected + request * K + k, (k * 0 - 1).to(tl.int64), mask=k < K)
    at = kept + (request * K + k[:, None]) * S
    path = tl.load(ancestors + node[:, None] * N + n[None, :], mask=(k < K)[:, None] & inside[None, :], other=0) != 0
    tl.store(at + level[None, :] - 1, tl.broadcast_to(token[None, :], [KP, NP]), mask=path & (level > 0)[None, :])
    s = tl.arange(0, SP)[None, :]
    tl.store(at + s, tl.zeros([KP, SP], tl.int64), mask=(k < K)[:, None] & (s >= reached[:, None]) & (s < S))


@dependent_kernel
def blocks_kernel(
    anchor,
    kept,
    prefix_len,
    blocks,
    kept_stride,
    branch_stride,
    mask_token,
    S: tl.constexpr,
    GP: tl.constexpr,
    K: tl.constexpr,
):
    """Grid (B, K). kept: tokens [B, K, S]; blocks: [B, K, 1 + S]."""
    wait_for_prior_kernels()
    request, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g = tl.arange(0, GP)
    length = tl.load(prefix_len + request * K + k)
    token = tl.load(
        kept + request * kept_stride + k * branch_stride + g - 1, mask=(g > 0) & (g <= length), other=mask_token
    )
    token = tl.where(g == 0, tl.load(anchor + request), token)
    tl.store(blocks + (request * K + k) * (1 + S) + g, token, mask=g <= S)


@dependent_kernel
def branches_kernel(
    anchor, top1, confidence, kept, prefix_len, tokens, parent, depth, branch_id, valid, score, attn_mask, num_merged,
    top1_stride, confidence_stride, kept_stride, branch_stride,
    S: tl.constexpr, FIRST: tl.constexpr, COUNTS: tl.constexpr,
    C: tl.constexpr, G: tl.constexpr, CP: tl.constexpr, GP: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (B). Of every source: top1, confidence [B, S] or [B, K, S]; kept [B, K, S] and prefix_len [B, K], or None;
    FIRST and COUNTS, its rows of C in all.
    """
    wait_for_prior_kernels()
    request = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CP)[:, None]
    g = tl.arange(0, GP)[None, :]
    slot = g - 1
    drafted = tl.load(confidence[0] + request * confidence_stride[0] + slot, mask=(g > 0) & (g < G), other=0.0)
    rejected = log(-expm1(tl.minimum(drafted, -1e-7)))
    token = tl.where(g == 0, tl.load(anchor + request), tl.zeros([CP, GP], tl.int64))
    logprob = tl.zeros([CP, GP], tl.float32)
    for s in tl.static_range(len(COUNTS)):
        k = c - FIRST[s]
        inside = (k >= 0) & (k < COUNTS[s]) & (g > 0) & (g < G)
        length = c * 0
        if kept[s] is not None:
            own = (k >= 0) & (k < COUNTS[s])
            length = tl.load(prefix_len[s] + request * COUNTS[s] + k, mask=own, other=0).to(tl.int32)
        at = request * top1_stride[s] + k * S + slot
        token = tl.where(inside, tl.load(top1[s] + at, mask=inside & (slot >= length), other=0), token)
        at = request * confidence_stride[s] + k * S + slot
        again = tl.load(confidence[s] + at, mask=inside & (slot >= length), other=0.0)
        if kept[s] is not None:
            is_kept = inside & (slot < length)
            at = request * kept_stride[s] + k * branch_stride[s] + slot
            token = tl.where(is_kept, tl.load(kept[s] + at, mask=is_kept, other=0), token)
            # What follows a boundary is conditional on the rejection of the first draft there.
            again = tl.where(is_kept, drafted, again + tl.where(slot == length, rejected, 0.0))
        logprob = tl.where(inside, again, logprob)
    path_score = tl.cumsum(logprob.to(tl.float64), axis=1).to(tl.float32)
    token = tl.where(path_score > float("-inf"), token, -1)

    # The first candidate with the same tokens so far owns the node.
    owner = c + tl.zeros([CP, GP], dtype=tl.int32)
    for back in range(C):
        e = C - 1 - back
        other = tl.sum(tl.where(c == e, token, 0), axis=0)[None, :]
        same = tl.cumsum((token != other).to(tl.int32), axis=1) == 0
        owner = tl.where(same & (c < C), e, owner)
    store_candidates(
        token, path_score, owner, tokens, parent, depth, branch_id, valid, score, attn_mask, num_merged,
        C, G, CP, GP, N, NP, TILE,
    )  # fmt: skip
