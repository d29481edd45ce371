"""The likeliest tree under a node budget: best-first over the candidates of all sources (DDTree has one).

A node's score is the log-probability of its path, so no child exceeds its parent and the best N nodes are
prefix-closed. They are found level by level with static shapes instead of a heap: the best N of a level are among the
children of the best N of the level before.

    at the root       candidates slot by slot: the same for every path
    behind a branch   candidates for paths that pass through its prefix, conditioned on all of it

    root ─ a ─ b ─ …      in a lane, which is a source and those that replace it, a path is continued by the deepest
         └ x ─[x│y]─ …    branch whose prefix it has passed, so siblings differ; equal children from two lanes become
                          one, the likelier, of equals that of the earlier lane

    a source that follows proposes to paths that took its likeliest token in every slot, other sources' or its own

    a row may say what a candidate is worth behind each candidate of its slot before: that holds where it proposed the
    parent
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from d2sd.plugins.dispatch import Implementation, op, pick
from d2sd.plugins.trees.cpu import MOST_ROWS
from d2sd.plugins.trees.reference.nodes import from_scored_nodes
from d2sd.plugins.trees.types import OP, PATH_BITS, Source, Tree, lanes, path_bits

# Shape letters: B requests, R rows of all sources, L lanes, S slots, M candidates a slot, P parents that a row splits
# apart: 1, or any and M; N nodes, W ≤ N nodes of one level.


def _picked(anchor: Tensor, sources: Sequence[Source], rows: int) -> Implementation:
    count, reason = sum(source.rows for source in sources), None
    if (bits := path_bits(1 + lanes(sources)[-1], count)) > PATH_BITS:
        reason = f"a path has {bits} bits, more than {PATH_BITS}: there are too many branches"
    return pick(OP, anchor, reason=reason, library=count <= MOST_ROWS)


@op(OP, picked=_picked)
def best_first_tree(anchor: Tensor, sources: Sequence[Source], rows: int) -> Tree:
    """anchor [B] and sources of S slots -> the `rows` likeliest nodes of all of them.

    Nodes are sorted by score, so a smaller tree is a prefix of a larger one. Which of equal scores come first
    is not specified.
    """
    batch, slots, device = len(anchor), sources[0].draft.tokens.shape[-2], anchor.device
    tokens, table, kept, prefix_len = _rows(sources)
    width = tokens.shape[-1]
    lane = torch.cat([torch.full((s.rows,), n, device=device) for s, n in zip(sources, lanes(sources), strict=True)])
    own = lane == torch.arange(lanes(sources)[-1] + 1, device=device)[:, None]  # [L, R]
    follows = pad(torch.cat([torch.full((s.rows,), s.follows, device=device) for s in sources]), (1, 0))  # [1 + R]
    at_root = own & torch.cat([torch.full((s.rows,), s.branches is None, device=device) for s in sources])
    zeros = torch.zeros(batch, 1, dtype=torch.long, device=device)
    b = torch.arange(batch, device=device)[:, None, None]

    # The current level, [B, W]; `index` is a node's index in the list of all nodes found so far.
    score, index = zeros.float(), zeros
    # The row that continues a path in each lane, from 1; 0: none.
    state = (at_root.int().argmax(-1) + 1).where(at_root.any(-1), 0).expand(batch, 1, -1)  # [B, W, L]
    above_rank = torch.zeros_like(state)  # which parent it is to that row; 0: any
    passed = torch.ones_like(prefix_len, dtype=torch.bool)[:, None]  # [B, W, R]
    found = [(anchor[:, None], zeros, zeros, zeros, score)]  # token, parent's index, depth, branch_id, score
    count = 1
    for depth in range(slots):
        children = tokens[b, state, depth]  # [B, W, L, M]
        scores = (score[..., None, None] + _merged(children, table[b, state, depth, above_rank])).flatten(1)
        score, best = scores.topk(min(rows, scores.shape[1]), dim=-1)
        above = best // (len(own) * width)
        token = children.flatten(1).gather(1, best)
        parent, row = index.gather(1, above), state.flatten(1).gather(1, best // width)
        found.append((token, parent, torch.full_like(token, depth + 1), row - 1, score))
        index = torch.arange(count, count + token.shape[1], device=device).expand(batch, -1)
        count += token.shape[1]
        matches = kept[:, None, :, depth] == token[..., None]  # [B, W, R]
        passed = passed.gather(1, above[..., None].expand(-1, -1, passed.shape[2])) & matches
        enters = (passed & (prefix_len[:, None] == depth + 1))[:, :, None] & own  # [B, W, L, R]
        state = state.gather(1, above[..., None].expand(-1, -1, len(own)))
        state = state.masked_fill(follows[state] & (tokens[b, state, depth, 0] != token[..., None]), 0)
        state = torch.where(enters.any(-1), enters.int().argmax(-1) + 1, state)
        rank = (best % width + 1)[..., None]
        above_rank = torch.where(state == row[..., None], rank, 0).clamp(max=table.shape[3] - 1)
    return from_scored_nodes(
        *(torch.cat(column, dim=1) for column in zip(*found, strict=True)), deepest=slots, budget=rows
    )


def _rows(sources: Sequence[Source]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Candidates [B, 1 + R, S, M] and log-probabilities [B, 1 + R, S, P, M] of all rows, of which row 0 proposes
    nothing; the tokens and the lengths of their prefixes [B, R, S] and [B, R], 0 at the root.
    """
    batch, *_, slots, _ = sources[0].draft.tokens.shape
    width = max(source.draft.tokens.shape[-1] for source in sources)
    parents = 1 + width if any(source.draft.behind is not None for source in sources) else 1
    tokens, table, kept, length = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    for source in sources:
        draft, room = source.draft, (0, width - source.draft.tokens.shape[-1])
        tokens.append(pad(draft.tokens, room).view(batch, source.rows, slots, width))
        told = draft.table.shape[-2]  # a row that does not tell parents apart says the same of all
        own = pad(draft.table, room, value=-math.inf).view(batch, source.rows, slots, told, width)
        table.append(pad(own, (0, 0, 0, parents - told)) if told > 1 else own.expand(-1, -1, -1, parents, -1))
        at = source.branches
        kept.append(draft.tokens.new_zeros(batch, 1, slots) if at is None else at.tokens)
        length.append(draft.tokens.new_zeros(batch, 1) if at is None else at.prefix_len)
    tokens.insert(0, torch.zeros_like(tokens[0][:, :1]))
    table.insert(0, torch.full_like(table[0][:, :1], -math.inf))
    return torch.cat(tokens, 1), torch.cat(table, 1), torch.cat(kept, 1), torch.cat(length, 1)


def _merged(tokens: Tensor, logprob: Tensor) -> Tensor:
    """Log-probabilities [B, W, L, M] without the children that another lane proposes as well and finds likelier."""
    if logprob.shape[2] == 1:
        return logprob
    lane = torch.arange(logprob.shape[2], device=tokens.device).repeat_interleave(logprob.shape[3])
    one, other = logprob.flatten(2)[..., None], logprob.flatten(2)[:, :, None]
    loses = torch.where(lane[:, None] > lane, ~(one > other), (lane[:, None] < lane) & (other > one))
    same = tokens.flatten(2)[..., None] == tokens.flatten(2)[:, :, None]
    return logprob.masked_fill((same & loses).any(-1).view_as(logprob), -math.inf)
