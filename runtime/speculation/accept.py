"""Acceptance of tree nodes. Lossless at any temperature: only tokens that the target chose are committed.

A node is accepted iff its parent is accepted and its token is the one the target chose at its parent. Siblings differ,
so the accepted nodes form one path from the root; the token chosen at its end is the bonus token, the next anchor.

Without sampling parameters the choice is an argmax, made at all nodes at once. Otherwise it is made along the accepted
path alone, level by level: at most γ rows of noise and filters a request instead of one for each node, and penalties
see the tokens that were chosen before, as in plain decoding.

A node whose row has no token to choose ends the path with `NOT_FINITE` or `NONE_LEFT`, which no child has: the host
reads it with the step's tokens and ends that request alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins import choice, trees
from d2sd.plugins.choice import best_token
from d2sd.plugins.trees import Accepted, Tree
from d2sd.runtime.sampling.sample import Sampling, token_scores
from d2sd.token_codes import NONE_LEFT, NOT_FINITE

# Shape letters: B requests, N nodes, G block size γ: no path is longer; V vocabulary.


def sample_target(
    tree: Tree,
    logits: Tensor,
    context_len: Tensor,
    sampling: Sampling,
    longest: int,
    mask: Tensor | None = None,
    places: Tensor | None = None,
    *,
    static_shapes: bool = True,
) -> Accepted:
    """Choose the target's tokens and accept along them; paths have at most `longest` nodes (γ).

    logits [B, N, V], or [M, V] with `places` (see `Verified`); context_len [B], the root's position.
    `mask` [B, N, ceil(V / 32)] int32 has a bit for each token that a grammar allows after the node, the lowest for
    token 0; -1 in the rows of unconstrained requests.
    Without `static_shapes` the paths that have ended are left out of the levels below, which reads back from the
    device: then a step chooses no more rows than plain decoding chooses for the same tokens.
    """
    if mask is None and (sampling.is_argmax or (not sampling.changes_logits and choice.reads_any_type(logits))):
        if places is None:
            return trees.accept(tree, choice.choose(logits, context_len, tree.depth, sampling), longest)
        return trees.accept(tree, choice.choose(logits[None], context_len, places, sampling)[0][places], longest)
    tree = tree if tree.rows is None else tree.cut(tree.rows)
    (batch, nodes), vocab_size = tree.tokens.shape, logits.shape[-1]
    noise = sampling.noise(context_len, longest, vocab_size) if static_shapes else None
    row, numbers = torch.arange(batch, device=logits.device), torch.arange(nodes, device=logits.device)
    is_child = tree.valid & (numbers > 0)  # the root's parent is 0, itself
    path, tokens = row.new_zeros(batch, longest), row.new_zeros(batch, longest)
    count, last = torch.zeros_like(row), torch.zeros_like(row)
    node, on_path = torch.zeros_like(row), torch.ones_like(row, dtype=torch.bool)  # of the requests `row`
    for depth in range(longest):
        before = context_len[row] + depth
        level_noise = sampling.noise(before, 1, vocab_size) if noise is None else noise[:, depth : depth + 1]
        allowed = None if mask is None else unpack_bits(mask[row, node], vocab_size)
        rows = logits[row, node] if places is None else logits[places[row, node]]
        chosen = _choose(rows.float(), before + 1, sampling, level_noise, allowed)
        path[row, depth] = node.where(on_path, 0)
        tokens[row, depth] = chosen
        count[row] += on_path
        last[row] = node.where(on_path, last[row])
        found = is_child[row] & (tree.parent[row] == node[:, None]) & (tree.tokens[row] == chosen[:, None])
        on_path = on_path & found.any(-1)
        node = found.int().argmax(-1)
        sampling = sampling.after(chosen.clamp(min=0))
        if not static_shapes:
            (alive,) = on_path.nonzero(as_tuple=True)
            if not len(alive):
                break
            row, node, on_path, sampling = row[alive], node[alive], on_path[alive], sampling.select(alive)
    return Accepted(path, count, tokens, tree.branch_id.gather(1, last[:, None])[:, 0])


def _choose(
    logits: Tensor, position: Tensor, sampling: Sampling, noise: Tensor | None, allowed: Tensor | None
) -> Tensor:
    """The tokens [R] at `position` [R]: logits [R, V], noise [R, 1, V] or None, allowed [R, V] or None.

    `NOT_FINITE` where the target's own logits are at fault, else `NONE_LEFT` where no token has a finite score.
    """
    chosen = best_token(token_scores(logits, position, sampling, None if noise is None else noise[:, 0], allowed))
    at_fault = ~logits.amax(-1).isfinite()  # NaN anywhere is the largest, so masks do not hide it
    return torch.where(at_fault, NOT_FINITE, chosen.where(chosen >= 0, NONE_LEFT))


def unpack_bits(words: Tensor, size: int) -> Tensor:
    """int32 [B, W] -> bool [B, size], the lowest bit first."""
    bits = (words[..., None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    return bits.flatten(-2)[..., :size].bool()
