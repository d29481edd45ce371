"""The likeliest tree under a node budget: best-first over per-slot candidates (DDTree), or over two passes at once.

A node's score is the log-probability of its path, so no child exceeds its parent and the best N nodes are
prefix-closed. They are found level by level with static shapes instead of a heap: the best N of a level are among the
children of the best N of the level before.

    state 0          candidates of the first pass, slot by slot: the same for every path
    state k = 1..K   candidates of branch k: for paths that pass through its prefix, conditioned on all of it

    root ─ a ─ b ─ …      a path is continued by the deepest branch whose prefix it has passed; so each path has one
         └ x ─[x│y]─ …    source, siblings differ, and identical children cannot arise
"""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins.trees.reference.nodes import from_scored_nodes
from d2sd.plugins.trees.types import Branches, Draft, Tree

# Shape letters: B requests, K branches, S slots, M candidates a slot, N nodes, W ≤ N nodes of one level.


def best_first_tree_reference(
    anchor: Tensor, first: Draft, rows: int, branches: Branches | None = None, second: Draft | None = None
) -> Tree:
    """`best_first_tree` in PyTorch: the specification. Which of equal scores come first is not specified."""
    batch, slots, width = first.tokens.shape
    device = anchor.device
    tokens, logprob = first.tokens[:, None], first.logprob[:, None]
    if branches is not None and second is not None:
        tokens, logprob = torch.cat([tokens, second.tokens], 1), torch.cat([logprob, second.logprob], 1)
    zeros = torch.zeros(batch, 1, dtype=torch.long, device=device)
    b = torch.arange(batch, device=device)[:, None]

    # The current level, [B, W]; `index` is a node's index in the list of all nodes found so far.
    score, state, index = zeros.float(), zeros, zeros
    passed = None if branches is None else torch.ones_like(branches.prefix_len, dtype=torch.bool)[:, None]  # [B, W, K]
    found = [(anchor[:, None], zeros, zeros, zeros, score)]  # token, parent's index, depth, branch_id, score
    count = 1
    for depth in range(slots):
        scores = (score[..., None] + logprob[b, state, depth]).flatten(1)  # [B, W·M]
        score, best = scores.topk(min(rows, scores.shape[1]), dim=-1)
        above = best // width
        token = tokens[b, state, depth].flatten(1).gather(1, best)
        parent, branch_id = index.gather(1, above), state.gather(1, above)
        found.append((token, parent, torch.full_like(token, depth + 1), branch_id, score))
        index = torch.arange(count, count + token.shape[1], device=device).expand(batch, -1)
        count += token.shape[1]
        state = branch_id
        if branches is not None and passed is not None:
            matches = branches.tokens[:, None, :, depth] == token[..., None]  # [B, W, K]
            passed = passed.gather(1, above[..., None].expand(-1, -1, passed.shape[2])) & matches
            enters = passed & (branches.prefix_len[:, None] == depth + 1)
            state = torch.where(enters.any(-1), enters.int().argmax(-1) + 1, branch_id)
    return from_scored_nodes(
        *(torch.cat(column, dim=1) for column in zip(*found, strict=True)), deepest=slots, budget=rows
    )
