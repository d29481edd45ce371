"""The draft tree: candidates that share prefixes become one prefix tree of nodes, verified in one target pass.

    candidates (slot 0 is the anchor)        nodes, in candidate order; (parent)
      first draft   A b c d                  0 A(0)  1 b(0)  2 c(1)  3 d(2)
      branch        A b x y                  4 x(1)  5 y(4)                        b is shared, so it is one node
      branch        A b x z                  6 z(4)                                x as well: identical children merge

A node is identified by its path of tokens, so siblings always differ and at most one of them can be accepted. Nodes
beyond the node budget are dropped from the end: a parent's index is always smaller than its child's, so the remaining
tree is prefix-closed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from d2sd.plugins.dispatch import op
from d2sd.plugins.trees.types import OP, Accepted, Tree

# Shape letters: B requests, C candidates, G block size γ, N nodes (the node budget), F nodes before the budget.


def with_anchor(anchor: Tensor, tokens: Tensor, logprob: Tensor) -> tuple[Tensor, Tensor]:
    """Prepend the anchor to candidates [B, (C,) S]; returns tokens and path scores, both [B, (C,) γ]."""
    anchor = anchor.view(-1, *[1] * (tokens.dim() - 1)).expand_as(tokens[..., :1])
    score = torch.cat([torch.zeros_like(logprob[..., :1]), logprob.cumsum(-1)], dim=-1)
    return torch.cat([anchor, tokens], dim=-1), score


def max_nodes(block_size: int, branches: int) -> int:
    """Most nodes the first draft and K branches can have: γ plus, for the K shortest boundaries i, γ-1-i each."""
    return block_size + sum(block_size - 1 - i for i in range(branches))


@op(OP)
def from_chain(tokens: Tensor, score: Tensor) -> Tree:
    """A chain of one candidate [B, N] with path scores [B, N]; it ends before the first score of -inf."""
    batch, size = tokens.shape
    steps = torch.arange(size, device=tokens.device)
    depth = steps.expand(batch, size)
    valid = score > float("-inf")
    tokens, score = tokens.where(valid, 0), score.where(valid, float("-inf"))
    return _tree(tokens, (depth - 1).clamp(min=0), depth, valid, torch.zeros_like(tokens), score, size - 1)


@op(OP)
def from_candidates(candidates: Tensor, score: Tensor, budget: int) -> Tree:
    """candidates [B, C, G], all with the same slot 0, and their path scores [B, C, G] -> at most `budget` nodes. A
    candidate ends before its first score of -inf.
    """
    batch, count, size = candidates.shape
    device = candidates.device
    proposed = score > float("-inf")
    candidates = candidates.where(proposed, -1)  # no token: what is not proposed shares no node with what is
    # same[b, c, e, g]: candidates c and e agree on slots 0 .. g. The first such candidate owns the node.
    same = (candidates[:, :, None] == candidates[:, None]).int().cumprod(-1)
    owner = same.argmax(dim=2)  # [B, C, G]: argmax takes the first of equals
    own = (owner == torch.arange(count, device=device)[:, None]) & proposed
    index = own.flatten(1).int().cumsum(1).sub(1)  # [B, C·G]: node index, where `own`
    index = index.view(batch, count, size).gather(1, owner)  # node of every slot, shared nodes included
    parent = torch.cat([torch.zeros_like(index[..., :1]), index[..., :-1]], dim=-1)

    # Scatter owned slots to their nodes; the rest, and those beyond the budget, to a spare column that is cut off.
    column = torch.where(own & (index < budget), index, budget).flatten(1).long()

    def nodes(values: Tensor) -> Tensor:
        out = torch.zeros(batch, budget + 1, dtype=values.dtype, device=device)
        return out.scatter_(1, column, values.expand(batch, count, size).reshape(batch, -1))[:, :budget]

    steps, numbers = torch.arange(size, device=device), torch.arange(count, device=device)[:, None]
    total = own.flatten(1).sum(1)
    valid = torch.arange(budget, device=device) < total[:, None]
    return _tree(
        nodes(candidates),
        nodes(parent.long()),
        nodes(steps),
        valid,
        nodes(numbers),
        nodes(score),
        size - 1,
        merged=proposed.flatten(1).sum(1) - total,
    )


def from_scored_nodes(
    tokens: Tensor, parent: Tensor, depth: Tensor, branch_id: Tensor, score: Tensor, *, deepest: int, budget: int
) -> Tree:
    """The `budget` best of F nodes [B, F], each after its parent and with a score of at most the parent's.

    A score of -inf marks a missing node; no depth exceeds `deepest`.
    """
    padding = budget - tokens.shape[1]
    if padding > 0:
        tokens, parent, depth, branch_id = (pad(column, (0, padding)) for column in (tokens, parent, depth, branch_id))
        score = pad(score, (0, padding), value=float("-inf"))
    score, order = score.sort(dim=-1, descending=True, stable=True)  # stable: among equal scores a parent stays first
    rank = order.argsort(-1)
    parent = rank.gather(1, parent).gather(1, order)
    columns = (tokens.gather(1, order), parent, depth.gather(1, order), branch_id.gather(1, order))
    valid = score[:, :budget] > float("-inf")
    tokens, parent, depth, branch_id = (column[:, :budget].where(valid, 0) for column in columns)
    return _tree(tokens, parent, depth, valid, branch_id, score[:, :budget], deepest)


def replace_rows(tree: Tree, rows: Tensor, larger: Tree, kept: Tensor) -> Tree:
    """`tree` [B, N] with new trees of the requests `rows` [C]: the first N nodes `kept` [C, F] of `larger` [B, F].

    Every kept node's parent is kept as well; the nodes that are not are gone, or padding. F is at least N.
    """
    size = tree.tokens.shape[1]
    order = kept.logical_not().int().argsort(dim=-1, stable=True)  # stable: a parent stays before its children
    parent = order.argsort(-1).gather(1, larger.parent[rows]).gather(1, order)[:, :size]
    order = order[:, :size]
    valid, at = kept.gather(1, order), (rows[:, None], order)
    self_only = torch.eye(size, dtype=torch.bool, device=order.device)
    attn_mask = larger.attn_mask[rows[:, None, None], order[:, :, None], order[:, None]]

    def replaced(column: Tensor, new: Tensor) -> Tensor:
        return column.index_copy(0, rows, new)

    return Tree(
        replaced(tree.tokens, larger.tokens[at].where(valid, 0)),
        replaced(tree.parent, parent),
        replaced(tree.depth, larger.depth[at]),
        replaced(tree.valid, valid),
        replaced(tree.attn_mask, attn_mask.where(valid[..., None], self_only)),
        replaced(tree.branch_id, larger.branch_id[at].where(valid, 0)),
        replaced(tree.score, larger.score[at].masked_fill(~valid, float("-inf"))),
        replaced(tree.num_merged, larger.num_merged[rows]),
    )


def _tree(
    tokens: Tensor,
    parent: Tensor,
    depth: Tensor,
    valid: Tensor,
    branch_id: Tensor,
    score: Tensor,
    deepest: int,
    merged: Tensor | None = None,
) -> Tree:
    """Build the tree mask: each node attends to itself and its ancestors, added one level per iteration."""
    size = tokens.shape[1]
    self_only = torch.eye(size, dtype=torch.bool, device=tokens.device).expand(len(tokens), size, size)
    attn_mask = self_only
    for _ in range(min(deepest, size - 1)):
        attn_mask = attn_mask | attn_mask.gather(1, parent[..., None].expand(-1, -1, size))
    attn_mask = torch.where(valid[..., None], attn_mask, self_only)
    if merged is None:
        merged = torch.zeros_like(tokens[:, 0])
    return Tree(tokens, parent, depth, valid, attn_mask, branch_id, score.masked_fill(~valid, float("-inf")), merged)


@op(OP, of="tokens", library=True)
def accept(tree: Tree, chosen: Tensor, longest: int) -> Accepted:
    """Accept along `chosen` [B, N], the target's choice after each node; paths have at most `longest` nodes (γ).

    Nodes of the path are among the tree's `rows`, and agree with the target's choices, as all their ancestors do.
    """
    batch, size = chosen.shape
    tree = tree if tree.rows is None else tree.cut(tree.rows)
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
