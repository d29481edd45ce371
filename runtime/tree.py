"""The draft tree: candidates that share prefixes become one prefix tree of nodes, verified in one target pass.

    candidates (slot 0 is the anchor)        nodes, in candidate order; (parent)
      first draft   A b c d                  0 A(0)  1 b(0)  2 c(1)  3 d(2)
      branch        A b x y                  4 x(1)  5 y(4)                        b is shared, so it is one node
      branch        A b x z                  6 z(4)                                x as well: identical children merge

A node is identified by its path of tokens, so siblings always differ and at most one of them can be accepted. Nodes
beyond the row budget are dropped from the end: since a node's parent always stands before it, what is left is
prefix-closed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Shape letters: B requests, C candidates, G block size γ, N nodes (the row budget), F = C·G slots of all candidates.


@dataclass(frozen=True, slots=True)
class Tree:
    """N rows a request; rows past the last node are padding: not valid, seeing themselves only."""

    tokens: Tensor  # [B, N] int64
    parent: Tensor  # [B, N] int64, always smaller than the node's own index; the root's is 0
    depth: Tensor  # [B, N] int64, 0 at the root
    valid: Tensor  # [B, N] bool
    visible: Tensor  # [B, N, N] bool: ancestors and self
    origin: Tensor  # [B, N] int64, candidate that brought the node first


def max_nodes(block_size: int, branches: int) -> int:
    """Most nodes the first draft and K branches can have: γ plus, for the K shortest boundaries i, γ-1-i each."""
    return block_size + sum(block_size - 1 - i for i in range(branches))


def chain(tokens: Tensor) -> Tree:
    """One candidate [B, G], or the bare anchor [B, 1]: every row a node, each the child of the one before."""
    batch, size = tokens.shape
    steps = torch.arange(size, device=tokens.device)
    visible = (steps[:, None] >= steps).expand(batch, size, size)
    depth = steps.expand(batch, size)
    return Tree(
        tokens,
        (depth - 1).clamp(min=0),
        depth,
        torch.ones_like(tokens, dtype=torch.bool),
        visible,
        torch.zeros_like(tokens),
    )


def merge(candidates: Tensor, budget: int) -> Tree:
    """candidates [B, C, G], all with the same slot 0 -> one tree of at most `budget` nodes."""
    batch, count, size = candidates.shape
    device = candidates.device
    # same[b, c, e, g]: candidates c and e agree on slots 0 .. g. The first candidate that does owns the node.
    same = (candidates[:, :, None] == candidates[:, None]).int().cumprod(-1)
    owner = same.argmax(dim=2)  # [B, C, G]: argmax takes the first of equals
    own = owner == torch.arange(count, device=device)[:, None]
    index = own.flatten(1).int().cumsum(1).sub(1)  # [B, F]: node number, where `own`
    index = index.view(batch, count, size).gather(1, owner)  # every slot's node, shared ones included
    parent = torch.cat([torch.zeros_like(index[..., :1]), index[..., :-1]], dim=-1)

    # Scatter owned slots to their nodes; the rest, and those beyond the budget, to a spare column that is cut off.
    place = torch.where(own & (index < budget), index, budget).flatten(1).long()

    def nodes(values: Tensor) -> Tensor:
        out = torch.zeros(batch, budget + 1, dtype=torch.long, device=device)
        return out.scatter_(1, place, values.expand(batch, count, size).reshape(batch, -1).long())[:, :budget]

    depth = nodes(torch.arange(size, device=device))
    parents = nodes(parent)
    valid = torch.arange(budget, device=device) < own.flatten(1).sum(1, keepdim=True)
    visible = torch.eye(budget, dtype=torch.bool, device=device).expand(batch, budget, budget)
    for _ in range(size - 1):  # a node sees what its parent sees: one level deeper each time
        visible = visible | visible.gather(1, parents[..., None].expand(-1, -1, budget))
    visible = torch.where(valid[..., None], visible, torch.eye(budget, dtype=torch.bool, device=device))
    origin = nodes(torch.arange(count, device=device)[:, None])
    return Tree(nodes(candidates), parents, depth, valid, visible, origin)
