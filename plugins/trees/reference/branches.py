"""Likely rejection boundaries of the first draft, and the branches that restart there (arXiv 2606.04446, Eq. 3-5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from d2sd.plugins.dispatch import Implementation, op, pick
from d2sd.plugins.trees.reference.growth import best_first_tree
from d2sd.plugins.trees.reference.nodes import from_candidates, with_anchor
from d2sd.plugins.trees.types import OP, Branches, Draft, Source, Tree

# Shape letters: B requests, K branches, S = γ - 1 slots, M candidates a slot, N nodes.

#: Branches of one tree that the kernels take: a bit each in a word of 64. Growth has other bits in it, see `path_bits`.
MOST_BRANCHES = 62


def _picked(*args: Any) -> Implementation:
    """By a draft and a number of branches, the last arguments."""
    *_, first, branches = args
    reason = None if branches <= MOST_BRANCHES else f"{branches} branches, more than {MOST_BRANCHES}"
    return pick(OP, first.tokens, reason=reason)


def boundary_scores(confidence: Tensor) -> Tensor:
    """Probability that the drafts are accepted up to the i-th and no further, i = 0 .. S - 1; log confidences [B, S] ->
    [B, S].

    r(i) = (c_1 … c_i)(1 - c_{i+1}). The rest is the probability that all are, behind which a pass has no slot left.
    """
    reached = torch.cat([torch.zeros_like(confidence[:, :1]), confidence.cumsum(-1)[:, :-1]], dim=-1).exp()
    return reached * -torch.expm1(confidence)


def log_rejected(confidence: Tensor) -> Tensor:
    """log(1 - c) of log confidences; c is clamped below 1, because fp32 rounds confident drafts to exactly 1."""
    return torch.log(-torch.expm1(confidence.clamp(max=-1e-7)))


@op(OP, picked=_picked)
def chain_branches(first: Draft, count: int) -> Branches:
    """D²SD: restart at the `count` likeliest of S boundaries, best first, with the draft at each presumed rejected."""
    length = boundary_scores(first.confidence).topk(count, dim=-1).indices
    return Branches(first.top1[:, None].expand(-1, count, -1), length, first.top1.gather(1, length))


def tree_branches(anchor: Tensor, first: Draft, count: int) -> Branches:
    """Restart at nodes of the first pass's best-first tree, not only along its best chain.

    The first pass predicts each slot's marginal only; after a node the second pass conditions on the whole path to it.
    A node u of the best chain scores its boundary score P(u)(1 - c), the probability that the chain ends there; any
    other node scores P(u), since none of its continuations was conditioned on it. The root is left out: there the
    second pass would have the same context as the first.
    """
    # Of K + S nodes the root and at most S - 1 others are on the chain, so the K best of the rest are among them.
    inner = first.part(slice(None), slice(-1))  # after slot S nothing is left to draft
    return branches_of_nodes(best_first_tree(anchor, [Source(inner)], count + first.top1.shape[1]), first, count)


@op(OP, picked=_picked)
def branches_of_nodes(tree: Tree, first: Draft, count: int) -> Branches:
    """The `count` best nodes of `tree`, grown from all slots of `first` but the last: see `tree_branches`."""
    slots = first.top1.shape[1]
    path = _paths(tree, slots)
    step = torch.arange(slots, device=tree.depth.device)
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


@op(OP, of="prefix_len")
def restart_blocks(branches: Branches, anchor: Tensor, mask_token_id: int) -> Tensor:
    """The second drafter's input [B, K, γ]: anchor [B], kept tokens, masks."""
    slots = torch.arange(branches.tokens.shape[-1], device=anchor.device)
    kept = torch.where(slots < branches.prefix_len[..., None], branches.tokens, mask_token_id)
    return torch.cat([anchor[:, None, None].expand(-1, kept.shape[1], 1), kept], dim=-1)


def mask_rejected(branches: Branches, logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """Mask each branch's rejected token in slot `prefix_len` of logits [B, K, S, V or Vd], in place; in the last slot
    where `prefix_len` is S.

    A rejected token outside the draft vocabulary needs no mask.
    """
    rejected = branches.rejected if ids is None else index_in_vocab(ids, branches.rejected)
    b = torch.arange(len(logits), device=logits.device)[:, None]
    k = torch.arange(logits.shape[1], device=logits.device)
    index = b, k, branches.prefix_len.clamp(max=logits.shape[2] - 1), rejected.clamp(min=0)
    logits[index] = logits[index].masked_fill(rejected >= 0, float("-inf"))
    return logits


def index_in_vocab(ids: Tensor, tokens: Tensor) -> Tensor:
    """Index of each token in the ascending `ids` [Vd]; -1 if it is missing."""
    index = torch.searchsorted(ids, tokens.contiguous()).clamp(max=len(ids) - 1)
    return index.where(ids[index] == tokens, -1)


def splice(branches: Branches, second: Draft) -> Tensor:
    """Full candidates [B, K, S]: kept tokens, then the second pass's best."""
    slots = torch.arange(branches.tokens.shape[-1], device=branches.tokens.device)
    return torch.where(slots < branches.prefix_len[..., None], branches.tokens, second.top1)


@op(OP)
def merged_branches(anchor: Tensor, sources: Sequence[Source], budget: int) -> Tree:
    """anchor [B] and sources of S slots, of which branches keep tokens of the first -> at most `budget` nodes: those
    of the first source's likeliest tokens, then of each row that follows. Each ends before its first score of -inf.
    """
    drafted = sources[0].draft.confidence[:, None]
    slots = torch.arange(drafted.shape[-1], device=anchor.device)
    tokens, logprob = list[Tensor](), list[Tensor]()
    for draft, branches in ((source.draft, source.branches) for source in sources):
        if branches is None:
            tokens.append(draft.top1[:, None])
            logprob.append(draft.confidence[:, None])
            continue
        length = branches.prefix_len[..., None]
        # What follows a boundary is conditional on rejection of the first draft there.
        rejected = torch.where(slots == length, log_rejected(drafted), 0.0)
        tokens.append(splice(branches, draft))
        logprob.append(torch.where(slots < length, drafted, draft.confidence + rejected))
    return from_candidates.reference(*with_anchor(anchor, torch.cat(tokens, 1), torch.cat(logprob, 1)), budget)
