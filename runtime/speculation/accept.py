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

from dataclasses import dataclass

import torch
from torch import Tensor

from d2sd.plugins import choice, trees
from d2sd.plugins.trees import cpu
from d2sd.runtime.sampling.sample import Sampling, best_token, token_scores
from d2sd.runtime.sequence import NONE_LEFT, NOT_FINITE
from d2sd.runtime.speculation.tree import Tree

# Shape letters: B requests, N nodes, G block size γ: no path is longer; V vocabulary.


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted path of each request."""

    path: Tensor  # [B, G] int64, node indices from the root; 0 past its end
    count: Tensor  # [B] int64, its length 1 .. γ: rows to commit, and new tokens (the bonus included)
    tokens: Tensor  # [B, G] int64, the target's choice at each node of the path: `count` new tokens, the rest unused;
    # below 0 where there is none to choose, on a path only at its end
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
    if trees.use_kernels(chosen):
        from d2sd.plugins.trees.triton.launch import accept_triton

        return Accepted(*accept_triton(tree.tokens, tree.parent, tree.valid, tree.branch_id, chosen, longest))
    if cpu.supported(chosen):
        columns = tree.tokens, tree.parent, tree.depth, tree.valid, tree.branch_id
        return Accepted(*cpu.accept(*columns, chosen, longest))
    return accept_reference(tree, chosen, longest)


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


def sample_target(
    tree: Tree,
    logits: Tensor,
    context_len: Tensor,
    sampling: Sampling,
    longest: int,
    mask: Tensor | None = None,
    *,
    static_shapes: bool = True,
) -> Accepted:
    """Choose the target's tokens and accept along them; paths have at most `longest` nodes (γ).

    logits [B, N, V]; context_len [B], the root's position. `mask` [B, N, ceil(V / 32)] int32 has a bit for each
    token that a grammar allows after the node, the lowest for token 0; -1 in the rows of unconstrained requests.
    Without `static_shapes` the paths that have ended are left out of the levels below, which reads back from the
    device: then a step chooses no more rows than plain decoding chooses for the same tokens.
    """
    if mask is None and not sampling.changes_logits and choice.use_kernels(logits):
        from d2sd.plugins.choice.triton.launch import choose_triton

        chosen = choose_triton(logits, context_len, tree.depth, sampling if sampling.any_sampled else None)
        return accept(tree, chosen, longest)
    if sampling.is_argmax and mask is None:
        return accept(tree, _argmax(logits), longest)
    batch, nodes, vocab_size = logits.shape
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
        chosen = _choose(logits[row, node].float(), before + 1, sampling, level_noise, allowed)
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


def _argmax(logits: Tensor) -> Tensor:
    """`best_token`, by the compiled library where it takes the call."""
    if not cpu.supported(logits):
        return best_token(logits)
    chosen = cpu.argmax(logits)
    return chosen.where(logits.gather(-1, chosen[..., None])[..., 0].isfinite(), NOT_FINITE)


def unpack_bits(words: Tensor, size: int) -> Tensor:
    """int32 [B, W] -> bool [B, size], the lowest bit first."""
    bits = (words[..., None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    return bits.flatten(-2)[..., :size].bool()
