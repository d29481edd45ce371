"""The gated delta rule as a recurrence, one row after the other: the specification of `exact` and of commits.

Along a path, from the committed state S [Dk, Dv] of a request and head (Gated DeltaNet, arXiv 2412.06464, equation 10):

    S <- e^g S;   S <- S + k (beta (v - Sᵀ k))ᵀ;   o = Sᵀ q Dk^-0.5

with q and k divided by their norm. A row's result depends on its ancestors alone, and on the order along its path:
a tree gives the bits of plain decoding, and a commit of five tokens the bits of five commits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention.arguments import ChunkMask
from d2sd.plugins.delta_rule.cpu import supported
from d2sd.plugins.delta_rule.types import OP, DeltaRows
from d2sd.plugins.dispatch import TYPES, Implementation, op, pick

# Shape letters as in d2sd/plugins/delta_rule/__init__.py.

#: Under the root of the sum of squares, as in the published models.
EPS = 1e-6
#: Sizes of heads that the kernels take, as far as they are powers of two.
SIZES = (16, 256)


def picked_commit(rows: DeltaRows, states: Tensor, *_: object) -> Implementation:
    """The implementation for these rows, by their arguments of `commit_delta_rule`."""
    reason, sizes = None, (rows.k.shape[-1], rows.v.shape[-1])
    if any(size & size - 1 or not SIZES[0] <= size <= SIZES[1] for size in sizes):
        reason = f"heads of {sizes[0]} and {sizes[1]} are not powers of two from {SIZES[0]} to {SIZES[1]}"
    elif rows.k.dtype not in TYPES:
        reason = f"keys of {rows.k.dtype}"
    return pick(OP, rows.v, reason=reason, library=supported(rows, states))


def picked_rule(q: Tensor, rows: DeltaRows, states: Tensor, *_: object, **__: object) -> Implementation:
    """The same by those of the other ops, which have queries."""
    return picked_commit(rows, states)


def normed(x: Tensor) -> Tensor:
    """x [..., D] divided by its norm, in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)


def parents_of(attn_mask: Tensor) -> Tensor:
    """[B, T, T] bool, ancestors and self -> [B, T] int64, -1 at roots. Ancestors come before their descendants."""
    columns = torch.arange(attn_mask.shape[-1], device=attn_mask.device)
    return torch.where(attn_mask.tril(-1), columns, -1).amax(-1)


def tree_recurrence(q: Tensor, rows: DeltaRows, states: Tensor, slots: Tensor, attn_mask: Tensor) -> Tensor:
    """`tree_delta_rule` with `exact`; holds the states of nodes that still have children to come."""
    parents = parents_of(attn_mask).tolist()
    out = torch.empty_like(rows.v)
    for request, slot in enumerate(slots.tolist()):
        prepared = _Rows(rows, request, q)
        children = [parents[request].count(node) for node in range(q.shape[1])]
        after: dict[int, Tensor] = {-1: states[slot].float()}
        for node, parent in enumerate(parents[request]):
            state, out[request, node] = prepared.step(after[parent], node)
            if parent >= 0:
                children[parent] -= 1
                if not children[parent]:
                    del after[parent]
            if children[node]:
                after[node] = state
    return out


def chunk_recurrence(q: Tensor, rows: DeltaRows, states: Tensor, slots: Tensor, chunks: ChunkMask) -> Tensor:
    """`chunk_delta_rule` with `exact`."""
    out = torch.empty_like(rows.v)
    prepared = _Rows(rows, 0, q)
    for slot, span in zip(slots.tolist(), chunks.spans(), strict=True):
        state = states[slot].float()
        for row in range(span.start, span.stop):
            state, out[0, row] = prepared.step(state, row)
        if slot:
            states[slot] = state
    return out


@op(OP, picked=picked_commit)
def commit_delta_rule(rows: DeltaRows, states: Tensor, slots: Tensor, path: Tensor, count: Tensor) -> None:
    """Advance the states of all layers along each request's accepted path, in place, row by row.

    Args:
        rows: stacked by layer, [L, B, T, ...] each.
        states: [L, P, Hv, Dk, Dv] fp32, contiguous.
        slots: [B] int64. No two requests have the same slot but 0.
        path, count: [B, G] and [B] int64, as of `d2sd.plugins.trees.Accepted`: the first `count` rows are committed.
    """
    for layer, pool in enumerate(states):
        one = DeltaRows(*(x[layer] for x in (rows.k, rows.v, rows.g, rows.beta)))
        for request, (slot, length) in enumerate(zip(slots.tolist(), count.tolist(), strict=True)):
            if not slot:
                continue
            prepared, state = _Rows(one, request), pool[slot].float()
            for row in path[request, :length].tolist():
                state, _ = prepared.step(state, row)
            pool[slot] = state


class _Rows:
    """Rows of one request in fp32, keys and queries of all value heads: [T, Hv, D]."""

    def __init__(self, rows: DeltaRows, request: int, q: Tensor | None = None) -> None:
        group = rows.v.shape[2] // rows.k.shape[2]
        self.k = normed(rows.k[request]).repeat_interleave(group, 1)
        self.q = None if q is None else normed(q[request]).repeat_interleave(group, 1) * q.shape[-1] ** -0.5
        self.v, self.gate, self.beta = rows.v[request].float(), rows.g[request].exp(), rows.beta[request].float()

    def step(self, state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        """State [Hv, Dk, Dv] after the row, and its output [Hv, Dv]."""
        k = self.k[row][..., None]
        state = state * self.gate[row][:, None, None]
        delta = self.beta[row][:, None] * (self.v[row] - (state * k).sum(1))
        state = state + k * delta[:, None]
        out = delta if self.q is None else (state * self.q[row][..., None]).sum(1)
        return state, out
