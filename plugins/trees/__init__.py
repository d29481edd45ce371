"""Draft trees: growing one from sources, merging branches into one, restarting a second pass, accepting along one.

    types.py       drafts, branches, sources of candidates, trees and accepted paths
    reference/     the specification in plain PyTorch, and the CPU path
    triton/        the kernels, one program a request, and their launchers
    cpu.py         growth and acceptance by the compiled library

All implementations return the same bits; of nodes with equal scores, which `topk` gives in any order, the kernels and
the library take the one of the better parent first, then the earlier candidate.
"""

from __future__ import annotations

from d2sd.plugins.trees.reference.branches import (
    chain_branches,
    log_rejected,
    mask_rejected,
    merged_branches,
    restart_blocks,
    tree_branches,
)
from d2sd.plugins.trees.reference.growth import best_first_tree
from d2sd.plugins.trees.reference.nodes import accept, from_candidates, from_chain, max_nodes, replace_rows, with_anchor
from d2sd.plugins.trees.types import Accepted, Branches, Draft, Source, Tree

__all__ = [
    "Accepted", "Branches", "Draft", "Source", "Tree", "accept", "best_first_tree", "chain_branches", "from_candidates",
    "from_chain", "log_rejected", "mask_rejected", "max_nodes", "merged_branches", "replace_rows", "restart_blocks",
    "tree_branches", "with_anchor",
]  # fmt: skip

# Shape letters: B requests, K branches, S = γ - 1 slots, M candidates a slot, C candidate chains, G block size γ, N
# nodes, V vocabulary, Vd draft vocabulary: logits [..., Vd] belong to the ascending `ids [Vd]`.
