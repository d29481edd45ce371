"""`head_stats` and its gradient in two kernels for GPUs: a program a row, which reads the logits twice and stores none.

Plain PyTorch reads and writes the logits some thirty times, more than the products cost. `head_stats` and
`head.py`'s backward pass are the specification.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found,type-arg"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Shape letters: N rows, C candidate ids. Logits are [N, C], contiguous, of any float type.


@triton.jit
def _row(logits, correction, forbidden, row, at, C):
    """fp32 logits of a row at the columns `at`, -1e30 for what is forbidden; -inf behind the last."""
    z = tl.load(logits + row * C + at, mask=at < C, other=float("-inf")).to(tl.float32)
    z += tl.load(correction + at, mask=at < C, other=0.0)
    return tl.where((at == forbidden) & (at < C), -1e30, z)


@triton.jit
def _stats_kernel(
    drafted, target, correction, labels, forbidden,
    log_q, cross, overlap, entropy, guess, norm_q, norm_p,
    C, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (N). The norms are the logarithms of the softmaxes' denominators."""
    row = tl.program_id(0).to(tl.int64)
    banned = tl.load(forbidden + row)
    high_q = tl.full([WIDTH], -1e30, tl.float32)
    high_p, best = high_q, high_q
    sum_q = tl.zeros([WIDTH], tl.float32)
    sum_p = sum_q
    place = tl.zeros([WIDTH], tl.int32)
    for start in range(0, C, WIDTH):
        at = start + tl.arange(0, WIDTH)
        q = _row(drafted, correction, banned, row, at, C)
        p = _row(target, correction, banned, row, at, C)
        top_q, top_p = tl.maximum(high_q, q), tl.maximum(high_p, p)
        sum_q = sum_q * tl.exp(high_q - top_q) + tl.exp(q - top_q)
        sum_p = sum_p * tl.exp(high_p - top_p) + tl.exp(p - top_p)
        high_q, high_p = top_q, top_p
        plain = q - tl.load(correction + at, mask=at < C, other=0.0)
        place = tl.where(plain > best, at, place)
        best = tl.maximum(best, plain)
    top_q, top_p = tl.max(high_q, 0), tl.max(high_p, 0)
    of_q = top_q + tl.log(tl.sum(sum_q * tl.exp(high_q - top_q), 0))
    of_p = top_p + tl.log(tl.sum(sum_p * tl.exp(high_p - top_p), 0))
    tl.store(guess + row, tl.min(tl.where(best == tl.max(best, 0), place, C), 0).to(tl.int64))
    label = tl.load(labels + row)
    own = tl.load(drafted + row * C + label).to(tl.float32) + tl.load(correction + label)
    tl.store(log_q + row, tl.where(label == banned, -1e30, own) - of_q)
    tl.store(norm_q + row, of_q)
    tl.store(norm_p + row, of_p)
    crossed = tl.zeros([WIDTH], tl.float32)
    shared, own_entropy = crossed, crossed
    for start in range(0, C, WIDTH):
        at = start + tl.arange(0, WIDTH)
        q = tl.maximum(_row(drafted, correction, banned, row, at, C), -1e30) - of_q
        p = tl.maximum(_row(target, correction, banned, row, at, C), -1e30) - of_p
        crossed -= tl.exp(p) * q
        shared += tl.minimum(tl.exp(p), tl.exp(q))
        own_entropy -= tl.exp(p) * p
    tl.store(cross + row, tl.sum(crossed, 0))
    tl.store(overlap + row, tl.sum(shared, 0))
    tl.store(entropy + row, tl.sum(own_entropy, 0))


@triton.jit
def _gradient_kernel(
    drafted, target, correction, labels, forbidden, norm_q, norm_p, of_log_q, of_cross, of_overlap,
    out, C, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (N). `out [N, C]`: the gradient with respect to the drafter's logits, in the type of `out`."""
    row = tl.program_id(0).to(tl.int64)
    banned, label = tl.load(forbidden + row), tl.load(labels + row)
    log_norm_q, log_norm_p = tl.load(norm_q + row), tl.load(norm_p + row)
    own, cross, overlap = tl.load(of_log_q + row), tl.load(of_cross + row), tl.load(of_overlap + row)
    summed = tl.zeros([WIDTH], tl.float32)
    for start in range(0, C, WIDTH):
        at = start + tl.arange(0, WIDTH)
        q = tl.exp(_row(drafted, correction, banned, row, at, C) - log_norm_q)
        p = tl.exp(_row(target, correction, banned, row, at, C) - log_norm_p)
        summed += tl.where(q == p, 0.5, tl.where(q < p, 1.0, 0.0)) * q
    mean = overlap * tl.sum(summed, 0)
    for start in range(0, C, WIDTH):
        at = start + tl.arange(0, WIDTH)
        q = tl.exp(_row(drafted, correction, banned, row, at, C) - log_norm_q)
        p = tl.exp(_row(target, correction, banned, row, at, C) - log_norm_p)
        slope = overlap * tl.where(q == p, 0.5, tl.where(q < p, 1.0, 0.0)) - mean
        slope = (slope + cross - own) * q - cross * p + tl.where(at == label, own, 0.0)
        tl.store(out + row * C + at, slope.to(out.dtype.element_ty), mask=at < C)


_WIDTH = 2048


def stats_triton(
    drafted: Tensor, target: Tensor, correction: Tensor, labels: Tensor, forbidden: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """`head_stats` in its order from logits [N, C], correction [C], labels and forbidden [N]; and norms [N] of both."""
    rows, columns = drafted.shape
    # one tensor each: Triton compiles anew for other alignments
    floats = (torch.empty(rows, dtype=torch.float32, device=drafted.device) for _ in range(6))
    log_q, cross, overlap, entropy, norm_q, norm_p = floats
    guess = torch.empty(rows, dtype=torch.long, device=drafted.device)
    if rows:
        with torch.cuda.device_of(drafted):  # type: ignore[no-untyped-call]  # Triton launches on the current device
            _stats_kernel[(rows,)](
                drafted, target, correction, labels, forbidden,
                log_q, cross, overlap, entropy, guess, norm_q, norm_p,
                columns, WIDTH=_WIDTH, num_warps=8,
            )  # fmt: skip
    return [log_q, cross, overlap, entropy, guess], norm_q, norm_p


def gradient_triton(
    drafted: Tensor,
    target: Tensor,
    correction: Tensor,
    labels: Tensor,
    forbidden: Tensor,
    norms: tuple[Tensor, Tensor],
    gradients: Sequence[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """[N, C] in `dtype`, from the gradients [N] of log_q, cross and overlap."""
    out = torch.empty(drafted.shape, dtype=dtype, device=drafted.device)
    if len(out):
        with torch.cuda.device_of(drafted):  # type: ignore[no-untyped-call]
            _gradient_kernel[(len(out),)](
                drafted, target, correction, labels, forbidden, *norms, *gradients, out, out.shape[1],
                WIDTH=_WIDTH, num_warps=8,
            )  # fmt: skip
    return out
