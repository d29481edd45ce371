"""Likely rejection boundaries of the first draft, and the branches that restart there (arXiv 2606.04446, Eq. 3-5)."""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins import trees
from d2sd.runtime.speculation.draft import Branches, Draft
from d2sd.runtime.speculation.growth import best_first_tree
from d2sd.runtime.speculation.tree import Tree

# Shape letters: B requests, K branches, S = γ - 1 slots, M candidates a slot, N nodes.


def boundary_scores(confidence: Tensor) -> Tensor:
    """Probability that exactly i of the S drafts are accepted, i = 0 .. S; log confidences [B, S] -> [B, S + 1].

    r(i) = (c_1 … c_i)(1 - c_{i+1}). r(S), "everything accepted", is not in the paper; with it the scores sum to 1.
    """
    reached = torch.cat([torch.zeros_like(confidence[:, :1]), confidence.cumsum(-1)], dim=-1).exp()
    rejected = torch.cat([-torch.expm1(confidence), torch.ones_like(confidence[:, :1])], dim=-1)
    return reached * rejected


def log_rejected(confidence: Tensor) -> Tensor:
    """log(1 - c) of log confidences; c is clamped below 1, because fp32 rounds confident drafts to exactly 1."""
    return torch.log(-torch.expm1(confidence.clamp(max=-1e-7)))


def chain_branches(first: Draft, count: int) -> Branches:
    """D²SD: restart at the `count` likeliest boundaries, best first, with the draft at each presumed rejected.

    If "everything accepted" is among them, its branch keeps the whole draft and adds no node.
    """
    if trees.use_kernels(first.tokens, count):
        from d2sd.plugins.trees.triton.launch import boundaries_triton

        length, rejected = boundaries_triton(first.top1, first.confidence, count)
        return Branches(first.top1[:, None].expand(-1, count, -1), length, rejected)
    length = boundary_scores(first.confidence).topk(count, dim=-1).indices
    slots = first.top1.shape[1]
    at_boundary = first.top1.gather(1, length.clamp(max=slots - 1))
    rejected = torch.where(length < slots, at_boundary, -1)
    return Branches(first.top1[:, None].expand(-1, count, -1), length, rejected)


def tree_branches(anchor: Tensor, first: Draft, count: int) -> Branches:
    """Restart at nodes of the first pass's best-first tree, not only along its best chain.

    The first pass predicts each slot's marginal only; after a node the second pass conditions on the whole path to it.
    A node u of the best chain scores its boundary score P(u)(1 - c), the probability that the chain ends there; any
    other node scores P(u), since none of its continuations was conditioned on it. The root is left out: there the
    second pass would have the same context as the first.
    """
    slots = first.top1.shape[1]
    # Of K + S nodes the root and at most S - 1 others are on the chain, so the K best of the rest are among them.
    inner = Draft(first.tokens[:, :-1], first.logprob[:, :-1])  # after slot S nothing is left to draft
    tree = best_first_tree(anchor, inner, count + slots)
    path = _paths(tree, slots)
    step = torch.arange(slots, device=anchor.device)
    on_chain = ((path == first.top1[:, None]) | (step >= tree.depth[..., None])).all(-1)
    next_confidence = first.confidence.gather(1, tree.depth.clamp(max=slots - 1))
    score = tree.score + torch.where(on_chain, log_rejected(next_confidence), 0.0)
    usable = tree.valid & (tree.depth > 0)
    score, node = score.masked_fill(~usable, float("-inf")).topk(count, dim=-1)
    length = tree.depth.gather(1, node)
    length = torch.where(usable.gather(1, node), length, slots)  # fewer nodes than branches
    return Branches(path.gather(1, node[..., None].expand(-1, -1, slots)), length, torch.full_like(length, -1))


def _paths(tree: Tree, slots: int) -> Tensor:
    """Tokens of the path to every node, without the root [B, N, S]; 0 past its depth."""
    step = torch.arange(slots, device=tree.tokens.device)
    at_step = tree.attn_mask[:, :, None] & (tree.depth[:, None] == step[:, None] + 1)[:, None]  # [B, N, S, N]
    return (at_step * tree.tokens[:, None, None]).sum(-1)
