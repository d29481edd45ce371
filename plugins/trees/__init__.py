"""Draft trees: growing one from sources, merging branches into one, restarting a second pass, accepting along one.

    types.py       drafts, branches, sources of candidates, trees and accepted paths
    reference/     the specification in plain PyTorch, and the CPU path
    triton/        the kernels, one program a request, and their launchers
    cpu.py         growth and acceptance by the compiled library

All implementations return the same bits; of nodes with equal scores, which `topk` gives in any order, the kernels and
the library take the one of the better parent first, then the earlier candidate.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from d2sd.plugins import dispatch
from d2sd.plugins.dispatch import Implementation
from d2sd.plugins.trees import cpu
from d2sd.plugins.trees.reference.branches import (
    branches_of_nodes,
    chain_branches_reference,
    log_rejected,
    mask_rejected,
    merged_branches_reference,
    restart_blocks_reference,
)
from d2sd.plugins.trees.reference.growth import best_first_tree_reference
from d2sd.plugins.trees.reference.nodes import (
    accept_reference,
    from_candidates_reference,
    from_chain_reference,
    max_nodes,
    replace_rows,
    with_anchor,
)
from d2sd.plugins.trees.types import PATH_BITS, Accepted, Branches, Draft, Source, Tree, lanes, path_bits

__all__ = [
    "Accepted", "Branches", "Draft", "Source", "Tree", "accept", "best_first_tree", "chain_branches", "from_candidates",
    "from_chain", "log_rejected", "mask_rejected", "max_nodes", "merged_branches", "replace_rows", "restart_blocks",
    "tree_branches", "with_anchor",
]  # fmt: skip

# Shape letters: B requests, K branches, S = γ - 1 slots, M candidates a slot, C candidate chains, G block size γ, N
# nodes, V vocabulary, Vd draft vocabulary: logits [..., Vd] belong to the ascending `ids [Vd]`.

OP = "the draft tree"
#: Branches of one tree that the kernels take: a bit each in a word of 64. Growth has other bits in it, see `path_bits`.
MOST_BRANCHES = 62


def _pick(x: Tensor, branches: int = 0, *, bits: int = 0, library: bool = False) -> Implementation:
    reason = None if branches <= MOST_BRANCHES else f"{branches} branches, more than {MOST_BRANCHES}"
    if bits > PATH_BITS:
        reason = f"a path has {bits} bits, more than {PATH_BITS}: there are too many branches"
    return dispatch.pick(OP, x, reason=reason, library=library)


def _picked_growth(anchor: Tensor, sources: Sequence[Source], rows: int) -> Implementation:
    count = sum(source.rows for source in sources)
    return _pick(anchor, bits=path_bits(1 + lanes(sources)[-1], count), library=count <= cpu.MOST_ROWS)


_LAUNCH = "d2sd.plugins.trees.triton.launch"
from_chain = dispatch.op(OP, from_chain_reference, f"{_LAUNCH}:chain_triton")
from_candidates = dispatch.op(OP, from_candidates_reference, f"{_LAUNCH}:candidates_triton")
merged_branches = dispatch.op(OP, merged_branches_reference, f"{_LAUNCH}:branches_triton")
best_first_tree = dispatch.op(
    OP, best_first_tree_reference, f"{_LAUNCH}:growth_triton", library=cpu.best_first_tree_cpu, picked=_picked_growth
)


def chain_branches(first: Draft, count: int) -> Branches:
    """D²SD: restart at the `count` likeliest of S boundaries, best first, with the draft at each presumed rejected."""
    if _pick(first.tokens, count) is Implementation.TRITON:
        from d2sd.plugins.trees.triton.launch import boundaries_triton

        length, rejected = boundaries_triton(first.top1, first.confidence, count)
        return Branches(first.top1[:, None].expand(-1, count, -1), length, rejected)
    return chain_branches_reference(first, count)


def tree_branches(anchor: Tensor, first: Draft, count: int) -> Branches:
    """Restart at nodes of the first pass's best-first tree, not only along its best chain.

    The first pass predicts each slot's marginal only; after a node the second pass conditions on the whole path to it.
    A node u of the best chain scores its boundary score P(u)(1 - c), the probability that the chain ends there; any
    other node scores P(u), since none of its continuations was conditioned on it. The root is left out: there the
    second pass would have the same context as the first.
    """
    # Of K + S nodes the root and at most S - 1 others are on the chain, so the K best of the rest are among them.
    inner = first.part(slice(None), slice(-1))  # after slot S nothing is left to draft
    tree = best_first_tree(anchor, [Source(inner)], count + first.top1.shape[1])
    if _pick(first.tokens, count) is Implementation.TRITON:
        from d2sd.plugins.trees.triton.launch import restarts_triton

        return Branches(*restarts_triton(tree, first.top1, first.confidence, count))
    return branches_of_nodes(tree, first, count)


def restart_blocks(branches: Branches, anchor: Tensor, mask_token_id: int) -> Tensor:
    """The second drafter's input [B, K, γ]: anchor [B], kept tokens, masks."""
    if _pick(anchor) is Implementation.TRITON:
        from d2sd.plugins.trees.triton.launch import blocks_triton

        return blocks_triton(anchor, branches.tokens, branches.prefix_len, mask_token_id)
    return restart_blocks_reference(branches, anchor, mask_token_id)


def accept(tree: Tree, chosen: Tensor, longest: int) -> Accepted:
    """Accept along `chosen` [B, N], the target's choice after each node; paths have at most `longest` nodes (γ)."""
    picked = _pick(chosen, library=True)
    if picked is Implementation.TRITON:
        from d2sd.plugins.trees.triton.launch import accept_triton

        return accept_triton(tree.tokens, tree.parent, tree.valid, tree.branch_id, chosen, longest)
    return (cpu.accept_cpu if picked is Implementation.LIBRARY else accept_reference)(tree, chosen, longest)
