"""Per-row statistics of the logits that the objectives need, without storing the logits.

The head is the largest matrix product of a drafter's training: rows × vocabulary, once for the drafter and once for the
target. Every objective uses five numbers per row of it, so these are computed first, and objectives are small functions
of them. Two implementations compute them:

    head_stats        plain autograd; keeps several [N, C] tensors until the backward pass: the reference
    head_stats_fused  in chunks of rows, recomputes the logits in the backward pass: used in training; its rows are
                      those of head_triton.py on a GPU
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Shape letters: N rows, C candidate ids (a vocabulary or a part of it), E hidden. p is the target, q the drafter.

#: Replaces -inf: exp gives 0, and 0 times it is 0, not NaN.
_NEVER = -1e30
#: Logits per chunk of `head_stats_fused`, 1 MB of fp32: they stay in a core's cache.
_CHUNK = 1 << 18
#: The same on a GPU, where they are bf16 and small chunks would cost more launches than work.
_CUDA_CHUNK = 1 << 28


class HeadStats(NamedTuple):
    """All in nats and fp32, over the candidate ids. `log_q`, `cross` and `overlap` carry gradients."""

    log_q: Tensor  # [N], of the label
    cross: Tensor  # [N], cross-entropy -Σ p log q
    overlap: Tensor  # [N], Σ min(p, q): the chance that rejection sampling accepts
    entropy: Tensor  # [N], of p
    guess: Tensor  # [N] int64, the drafter's argmax, an index into C


class Head(NamedTuple):
    """The frozen head over the candidate ids of one step."""

    weight: Tensor  # [C, E], in the dtype of the products
    correction: Tensor  # [C] fp32, added to all logits: sampled ids also represent those not drawn

    def logits(self, hidden: Tensor, forbidden: Tensor | None) -> Tensor:
        """hidden [N, E] -> [N, C] fp32; `forbidden [N]` is a candidate index to mask out of each row, -1: none."""
        with torch.autocast(hidden.device.type, enabled=False):
            logits = F.linear(hidden.to(self.weight.dtype), self.weight).float() + self.correction
        if forbidden is None:
            return logits
        hit = forbidden[:, None] == torch.arange(logits.shape[1], device=logits.device)
        return logits.masked_fill(hit, _NEVER)

    def best(self, hidden: Tensor) -> Tensor:
        """[N, E] -> [N] int64, the argmax over candidates of the logits without `correction`."""
        rows = _chunks(len(hidden), len(self.weight), cuda=hidden.is_cuda)
        return torch.cat([F.linear(hidden[part].to(self.weight.dtype), self.weight).argmax(-1) for part in rows])


class Added(NamedTuple):
    """A trained correction of the drafter's logits: inner · weightᵀ + bias."""

    inner: Tensor  # [N, R]
    weight: Tensor  # [C, R], of the candidate ids
    bias: Tensor  # [C]

    def of(self, rows: Tensor, ids: Tensor) -> Added:
        """A part of one that has inner [B, A, G, R] and the whole vocabulary: rows [N] of B·A·G, candidate ids [C]."""
        return Added(self.inner.flatten(0, 2)[rows], self.weight[ids], self.bias[ids])

    def logits(self, dtype: torch.dtype) -> Tensor:
        """[N, C] fp32; the product is in `dtype`."""
        with torch.autocast(self.inner.device.type, enabled=False):
            return F.linear(self.inner.to(dtype), self.weight.to(dtype)).float() + self.bias.float()


class Rows(NamedTuple):
    """The rows that statistics are of; those of the drafter and of the target are normed."""

    hidden: Tensor  # [N, E]
    target_hidden: Tensor  # [N, E]
    labels: Tensor  # [N], indices into the candidates
    head: Head
    forbidden: Tensor | None = None  # [N], as of `Head.logits`, for both
    added: Added | None = None

    def part(self, rows: slice) -> Rows:
        """Some of them."""
        banned = None if self.forbidden is None else self.forbidden[rows]
        added = None if self.added is None else self.added._replace(inner=self.added.inner[rows])
        return Rows(self.hidden[rows], self.target_hidden[rows], self.labels[rows], self.head, banned, added)


def head_stats(rows: Rows) -> HeadStats:
    """Statistics of the rows, whose gradients are autograd's."""
    hidden, target_hidden, labels, head, forbidden, added = rows
    logits = head.logits(hidden, forbidden)
    log_q = (logits if added is None else logits + added.logits(head.weight.dtype)).log_softmax(-1)
    with torch.no_grad():
        log_p = head.logits(target_hidden, forbidden).log_softmax(-1)
        p = log_p.exp()
    return HeadStats(
        log_q.gather(1, labels[:, None])[:, 0],
        -(p * log_q).sum(-1),
        torch.minimum(p, log_q.exp()).sum(-1),
        -(p * log_p).sum(-1),
        (log_q - head.correction).argmax(-1),
    )


def head_stats_fused(rows: Rows) -> HeadStats:
    """The same values and gradients as `head_stats`, with memory for one chunk of rows."""
    *given, added = rows
    return HeadStats(*_Fused.apply(*given, *(added or (None, None, None))))  # type: ignore[no-untyped-call]


class _Fused(torch.autograd.Function):
    """dz is the gradient with respect to the drafter's logits; the derivative of softmax is q (1[v] - q)."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        target_hidden: Tensor,
        labels: Tensor,
        head: Head,
        forbidden: Tensor | None,
        *added: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, target_hidden, labels, forbidden, *added)  # type: ignore[arg-type]
        ctx.head = head  # type: ignore[attr-defined]
        every = Rows(hidden, target_hidden, labels, head, forbidden, _added(added))
        parts, norms = [], []
        kernels = _triton() if hidden.is_cuda else None
        for rows in _chunks(len(hidden), len(head.weight), cuda=kernels is not None):
            given = every.part(rows)
            if kernels is None:
                parts.append(head_stats(given))
            else:
                stats, *both = kernels.stats_triton(*_inputs(given))
                parts.append(stats)
                norms.append(both)
        ctx.norms = norms  # type: ignore[attr-defined]
        out = [torch.cat(column) for column in zip(*parts, strict=True)]
        ctx.mark_non_differentiable(*out[3:])
        return tuple(out)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, target_hidden, labels, forbidden, *added = ctx.saved_tensors  # type: ignore[attr-defined]
        of_added = tuple(None if part is None else torch.zeros_like(part, dtype=torch.float32) for part in added)
        head: Head = ctx.head  # type: ignore[attr-defined]
        every = Rows(hidden, target_hidden, labels, head, forbidden, _added(added))
        out = torch.empty_like(hidden)
        kernels = _triton() if hidden.is_cuda else None
        for index, rows in enumerate(_chunks(len(hidden), len(head.weight), cuda=kernels is not None)):
            given = every.part(rows)
            slopes = [gradient[rows].contiguous() for gradient in gradients[:3]]
            if kernels is None:
                dz = _gradient(given, slopes)
            else:
                norms = ctx.norms[index]  # type: ignore[attr-defined]
                dz = kernels.gradient_triton(*_inputs(given), norms, slopes, head.weight.dtype)
            out[rows] = (dz @ head.weight).to(out.dtype)
            if given.added is not None:
                of_inner, of_weight, of_bias = of_added
                of_inner[rows] = dz @ given.added.weight.to(dz.dtype)  # type: ignore[index]
                of_weight += dz.T @ given.added.inner.to(dz.dtype)  # type: ignore[operator]
                of_bias += dz.sum(0)  # type: ignore[operator]
        learnt = (None if of is None else of.to(part.dtype) for of, part in zip(of_added, added, strict=True))
        return out, None, None, None, None, *learnt


def _gradient(rows: Rows, gradients: Sequence[Tensor]) -> Tensor:
    """dz [N, C] in the head's type, from the gradients [N] of log_q, cross and overlap."""
    hidden, target_hidden, labels, head, forbidden, added = rows
    of_log_q, of_cross, of_overlap = (gradient[:, None] for gradient in gradients)
    logits = head.logits(hidden, forbidden)
    q = (logits if added is None else logits + added.logits(head.weight.dtype)).softmax(-1)
    p = head.logits(target_hidden, forbidden).softmax(-1)
    # overlap grows with q where q < p; at equality the derivative is 0.5, as in autograd
    below = torch.where(q == p, 0.5, (q < p).float())
    dz = of_overlap * below
    dz -= (q * dz).sum(-1, keepdim=True)
    dz += of_cross - of_log_q
    dz *= q
    dz -= of_cross * p
    dz.scatter_add_(1, labels[:, None], of_log_q)
    return dz.to(head.weight.dtype)


@cache
def _triton() -> ModuleType | None:
    """The kernels, if Triton is installed."""
    if find_spec("triton") is None:
        return None
    from d2sd.train.objectives import head_triton

    return head_triton


def _inputs(rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The kernels' first arguments: logits of both without the head's correction, the correction, labels, forbidden."""
    hidden, target_hidden, labels, head, forbidden, added = rows
    with torch.autocast(hidden.device.type, enabled=False):
        drafted, target = (F.linear(part.to(head.weight.dtype), head.weight) for part in (hidden, target_hidden))
    if added is not None:
        drafted = drafted.float() + added.logits(head.weight.dtype)
    return drafted, target, head.correction, labels, torch.full_like(labels, -1) if forbidden is None else forbidden


def _added(parts: Sequence[Tensor | None]) -> Added | None:
    inner, weight, bias = parts
    return None if inner is None or weight is None or bias is None else Added(inner, weight, bias)


def _chunks(rows: int, width: int, *, cuda: bool = False) -> list[slice]:
    step = max(1, (_CUDA_CHUNK if cuda else _CHUNK) // width)
    return [slice(start, start + step) for start in range(0, max(rows, 1), step)]  # no rows: one empty chunk
