"""Acceptance of tree nodes. Lossless at any temperature: only tokens that the target chose are committed.

A node is accepted iff its parent is accepted and its token is the one the target chose at its parent. Siblings differ,
so the accepted nodes form one path from the root; the token chosen at its end is the bonus token, the next anchor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from d2sd.runtime.speculation.tree import Tree

# Shape letters: B requests, N nodes, G block size γ: no path is longer.


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted path of each request."""

    path: Tensor  # [B, G] int64, node indices from the root; 0 past its end
    count: Tensor  # [B] int64, its length 1 .. γ: rows to commit, and new tokens (the bonus included)
    tokens: Tensor  # [B, G] int64, the target's choice at each node of the path: `count` new tokens
    accepted_branch: Tensor  # [B] int64, `Tree.branch_id` of the path's last node

    def matches(self, row: int, drafted: list[int]) -> int:
        """Length of the prefix of `drafted` that equals the target's choices for request `row`, bonus included."""
        chosen: list[int] = self.tokens[row, : self.count[row]].tolist()
        pairs = zip(drafted, chosen, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(drafted), len(chosen)))

    def packed(self) -> Tensor:
        """Everything the host reads after a step, in one tensor [B, 2 + G]: count, accepted branch, tokens."""
        return torch.cat([self.count[:, None], self.accepted_branch[:, None], self.tokens], dim=1)


def accept(tree: Tree, chosen: Tensor, longest: int) -> Accepted:
    """Accept along `chosen` [B, N], the target's choice after each node; paths have at most `longest` nodes (γ)."""
    batch, size = chosen.shape
    agrees = tree.valid & (tree.tokens == chosen.gather(1, tree.parent))
    # the root is the anchor, which is committed already
    agrees = torch.cat([torch.ones_like(agrees[:, :1]), agrees[:, 1:]], dim=1)
    on_path = tree.valid & (agrees[:, None] | ~tree.attn_mask).all(-1)  # the node and all its ancestors agree
    count = on_path.sum(-1)
    # Depths on the path are 0, 1, 2, …: scatter each node to its depth, the others to a spare column that is cut off.
    column = torch.where(on_path, tree.depth, longest)
    path = torch.zeros(batch, longest + 1, dtype=torch.long, device=chosen.device)
    path = path.scatter_(1, column, torch.arange(size, device=chosen.device).expand(batch, size))[:, :longest]
    last = path.gather(1, count[:, None] - 1)
    return Accepted(path, count, chosen.gather(1, path), tree.branch_id.gather(1, last)[:, 0])
