"""The accepted path of a tree: the nodes whose tokens, and those of all their ancestors, are the target's choices."""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins.trees.types import Accepted, Tree

# Shape letters: B requests, N nodes, G block size γ: no path is longer.


def accept_reference(tree: Tree, chosen: Tensor, longest: int) -> Accepted:
    """`accept` in PyTorch: the specification."""
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
