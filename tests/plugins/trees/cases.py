"""Kernels of draft trees: of the usual size, and the largest; branches of a block of 16, a few and the most."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from d2sd.plugins import trees
from d2sd.plugins.trees import Branches, Draft, Source, Tree
from d2sd.plugins.trees.reference.branches import branches_of_nodes
from d2sd.plugins.trees.triton.branches import blocks_kernel, boundaries_kernel, branches_kernel, restarts_kernel
from d2sd.plugins.trees.triton.growth import grow_kernel
from d2sd.plugins.trees.triton.launch import mask_triton
from d2sd.plugins.trees.triton.nodes import accept_kernel, candidates_kernel, chain_kernel, mask_kernel
from tests.plugins.cases import Check, Kernel, some

SLOTS, VOCABULARY = 15, 32768
#: Columns of a tree, as `outputs` gives them.
COLUMNS = ("tokens", "parent", "depth", "branch_id", "valid", "score", "attn_mask", "num_merged")


def source(width: int, branches: int = 0, *, replaces: bool = False, told: bool = False) -> Source:
    """A source at the root, or behind `branches`; `told`: it tells its parents apart."""
    shape = (2, branches, SLOTS) if branches else (2, SLOTS)
    behind = some("fp32", *shape, 1 + width, width) if told else None
    draft = Draft(some("i64", *shape, width), some("fp32", *shape, width), behind)
    if not branches:
        return Source(draft)
    length = some("i64", 2, branches)
    return Source(draft, Branches(some("i64", *shape), length, length), replaces=replaces)


#: A draft, a second one behind its branches, and a copy that competes with both.
SOURCES = (source(16), source(16, 7, replaces=True), source(1))
TOLD = (source(16, told=True), source(16, 7, replaces=True, told=True), source(1))


def grow(nodes: int, count: int, told: bool = False) -> None:
    trees.best_first_tree.triton(some("i64", 2), (TOLD if told else SOURCES)[:count], nodes)


def mask(nodes: int) -> None:
    mask_triton(some("i64", 2, nodes), some("i64", 2, nodes), some("u1", 2, nodes), some("u1", 2, nodes, nodes))


def merge(count: int, size: int, nodes: int) -> None:
    trees.from_candidates.triton(some("i64", 2, count, size), some("fp32", 2, count, size), nodes)


def chain(nodes: int) -> None:
    trees.from_chain.triton(some("i64", 2, nodes), some("fp32", 2, nodes))


def accept(nodes: int) -> None:
    rows = some("i64", 2)
    tree = replace(Tree.empty(2, nodes, rows.device), rows=rows)
    trees.accept.triton(tree, tree.tokens, 16)


def chains() -> Draft:
    return Draft(some("i64", 2, SLOTS, 1), some("fp32", 2, SLOTS, 1))


def boundaries(count: int) -> None:
    trees.chain_branches.triton(chains(), count)


def restarts(count: int) -> None:
    tree = Tree.empty(2, SLOTS + count, some("i64", 2).device)
    branches_of_nodes.triton(tree, chains(), count)


def blocks(count: int) -> None:
    length = some("i64", 2, count)
    trees.restart_blocks.triton(Branches(some("i64", 2, count, SLOTS), length, length), some("i64", 2), 99)


def branch(count: int) -> None:
    trees.merged_branches.triton(some("i64", 2), [source(1), source(1, count, replaces=True)], 64)


KERNELS = (
    Kernel(
        grow_kernel,
        (*COLUMNS, "keys", "infos"),
        {
            f"grow {nodes} of {n} sources{', told apart' if told else ''}": partial(grow, nodes, n, told)
            for nodes in (64, 256, 1024)
            for n in (1, 2, 3)
            for told in (False, True)
        },
        reads_back=("keys", "infos"),
    ),
    Kernel(mask_kernel, ("attn_mask",), {f"mask {nodes}": partial(mask, nodes) for nodes in (128, 1024)}),
    Kernel(
        candidates_kernel,
        COLUMNS,
        {
            f"merge {count}x{size} to {nodes}": partial(merge, count, size, nodes)
            for count, size, nodes in ((8, 16, 64), (16, 16, 256), (8, 128, 1024))
        },
        reads_back=("parent", "depth"),
    ),
    Kernel(chain_kernel, COLUMNS, {f"chain {nodes}": partial(chain, nodes) for nodes in (16, 128)}),
    Kernel(accept_kernel, ("path", "packed"), {f"accept {nodes}": partial(accept, nodes) for nodes in (64, 1024)}),
    Kernel(
        boundaries_kernel,
        ("prefix_len", "rejected"),
        {f"boundaries {count}": partial(boundaries, count) for count in (4, 15)},
    ),
    Kernel(
        restarts_kernel,
        ("kept", "prefix_len", "rejected"),
        {f"restarts {count}": partial(restarts, count) for count in (4, 15, 49)},
    ),
    Kernel(blocks_kernel, ("blocks",), {f"blocks {count}": partial(blocks, count) for count in (4, 15)}),
    Kernel(
        branches_kernel,
        COLUMNS,
        {f"branches {count} to 64": partial(branch, count) for count in (4, 15)},
        reads_back=("parent", "depth"),
    ),
)
CHECKS = {
    "chain": Check("chain", "trees.test_chain", (5,)),
    "merge": Check("candidates", "trees.test_candidates", (5, 6, 13, 2)),
    "growth": Check("grow", "trees.test_growth", (2, 2, 2, 5, True), barriers=False),
    "large growth": Check("grow mask", "trees.test_growth", (2, 2, 0, 300, True)),
    "told apart": Check(
        "grow",
        "trees.test_candidates_behind_those_of_the_slot_before",
        (2, (2, 1), (0, 1), 5, (0, 1), True),
        barriers=False,
    ),
    "sources": Check("grow", "trees.test_sources", (2, (2, 1, 1), (0, 0, 1), 5, True), barriers=False),
    "acceptance": Check("accept", "trees.test_acceptance", (5, 6, 13), barriers=False),
    "boundaries": Check("boundaries", "branches.test_boundaries", (4, 2), barriers=False),
    "restarts": Check("restarts grow", "branches.test_restarts", (5, 3, 2), barriers=False),
    "blocks": Check("blocks", "branches.test_blocks", (5,), barriers=False),
    "branches": Check("branches", "branches.test_branches", (5, 3, 13, 2)),
}
