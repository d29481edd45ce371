"""Where the first draft is likely to be rejected, and the branches that restart there (arXiv 2606.04446, Eq. 3-5)."""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.runtime.speculation.draft import Branches, Draft
from d2sd.runtime.speculation.growth import best_first_tree
from d2sd.runtime.speculation.tree import Tree

# Shape letters: B requests, K branches, S = γ - 1 slots, M candidates a slot, N nodes.


def boundary_scores(confidence: Tensor) -> Tensor:
    """Probability that exactly i of the S drafts are accepted, i = 0 .. S; log confidences [B, S] -> [B, S + 1].

    r(i) = (c_1 … c_i)(1 - c_{i+1}). The paper has no r(S), "everything accepted"; with it the scores sum to 1.
    """
    reached = torch.cat([torch.zeros_like(confidence[:, :1]), confidence.cumsum(-1)], dim=-1).exp()
    rejected = torch.cat([-torch.expm1(confidence), torch.ones_like(confidence[:, :1])], dim=-1)
    return reached * rejected


def log_rejected(confidence: Tensor) -> Tensor:
    """log(1 - c) of log confidences; a drafter that is certain is so up to fp32's rounding only."""
    return torch.log(-torch.expm1(confidence.clamp(max=-1e-7)))


def chain_branches(first: Draft, count: int) -> Branches:
    """D²SD: restart at the `count` likeliest boundaries, best first, the draft behind each presumed wrong.

    Where "everything accepted" is among them its branch keeps the whole draft, so it adds no node.
    """
    length = boundary_scores(first.confidence).topk(count, dim=-1).indices
    slots = first.top1.shape[1]
    behind = first.top1.gather(1, length.clamp(max=slots - 1))
    rejected = torch.where(length < slots, behind, -1)
    return Branches(first.top1[:, None].expand(-1, count, -1), length, rejected)


def tree_branches(anchor: Tensor, first: Draft, count: int) -> Branches:
    """Restart at nodes of the first pass's own tree, not only along its best chain.

    The first pass knows each slot's marginal only; behind a node the second pass conditions on the whole path to it. A
    node u of the best chain is worth its boundary score P(u)(1 - c), the probability that the chain ends there; any
    other node P(u), since nothing behind it was drafted with it in view. The root is left out: from there the second
    pass would see what the first one saw.
    """
    slots = first.top1.shape[1]
    # Of K + S nodes the root and at most S - 1 others are on the chain: the K best of the rest are among them.
    inner = Draft(first.tokens[:, :-1], first.logprob[:, :-1])  # behind slot S there is nothing to draft
    tree = best_first_tree(anchor, inner, count + slots)
    path = _paths(tree, slots)
    step = torch.arange(slots, device=anchor.device)
    on_chain = ((path == first.top1[:, None]) | (step >= tree.depth[..., None])).all(-1)
    behind = first.confidence.gather(1, tree.depth.clamp(max=slots - 1))
    worth = tree.score + torch.where(on_chain, log_rejected(behind), 0.0)
    usable = tree.valid & (tree.depth > 0)
    worth, node = worth.masked_fill(~usable, float("-inf")).topk(count, dim=-1)
    length = tree.depth.gather(1, node)
    length = torch.where(usable.gather(1, node), length, slots)  # fewer nodes than branches
    return Branches(path.gather(1, node[..., None].expand(-1, -1, slots)), length, torch.full_like(length, -1))


def _paths(tree: Tree, slots: int) -> Tensor:
    """Tokens behind the root on the way to every node [B, N, S]; 0 past its depth."""
    step = torch.arange(slots, device=tree.tokens.device)
    here = tree.attn_mask[:, :, None] & (tree.depth[:, None] == step[:, None] + 1)[:, None]  # [B, N, S, N]
    return (here * tree.tokens[:, None, None]).sum(-1)
