"""Random draft trees, and what a slot's row says, walked node by node with no help of ours."""

from __future__ import annotations

import random
from typing import Any

import torch

from d2sd.plugins.trees import Tree


def random_tree(dice: random.Random, nodes: int, batch: int = 1, *, vocab: int = 50) -> Tree:
    """Trees of up to `nodes` nodes, padded; siblings differ, and a parent comes before its children."""
    tree = Tree.empty(batch, nodes)
    for column in (tree.tokens, tree.parent, tree.depth, tree.branch_id):
        column.zero_()
    tree.valid.fill_(False)
    tree.attn_mask.copy_(torch.eye(nodes, dtype=torch.bool))
    for row in range(batch):
        tree.valid[row, 0] = True
        tree.tokens[row, 0] = dice.randrange(vocab)
        for node in range(1, dice.randint(1, nodes)):
            parent = dice.randrange(node)
            taken = {int(tree.tokens[row, n]) for n in range(1, node) if int(tree.parent[row, n]) == parent}
            tree.tokens[row, node] = dice.choice(sorted(set(range(vocab + nodes)) - taken))
            tree.parent[row, node], tree.depth[row, node] = parent, tree.depth[row, parent] + 1
            tree.attn_mask[row, node] |= tree.attn_mask[row, parent]
            tree.valid[row, node] = True
    return tree


def paths_of(tree: Tree, row: int) -> dict[int, tuple[int, ...]]:
    """Nodes of a tree's row -> the tokens behind the root on the way to it, by its parents."""
    found: dict[int, tuple[int, ...]] = {}
    parents, tokens, valid = tree.parent[row].tolist(), tree.tokens[row].tolist(), tree.valid[row].tolist()
    for node, real in enumerate(valid):
        if real:
            found[node] = (*found[parents[node]], tokens[node]) if node else ()
    return found


def paths_by_links(storage: Any, slot: int, drafts: list[int]) -> dict[int, tuple[int, ...]]:
    """The same by first children and siblings of a slot's row, of tokens [N - 1] behind the root."""
    children, siblings = storage.retrieve_next_token[slot].tolist(), storage.retrieve_next_sibling[slot].tolist()
    found: dict[int, tuple[int, ...]] = {0: ()}
    waiting = [0]
    while waiting:
        node = waiting.pop()
        child = children[node]
        while child != -1:
            assert child not in found, "a node is reached twice"
            found[child] = (*found[node], drafts[child - 1])
            waiting.append(child)
            child = siblings[child]
    return found


def visible_by_bits(storage: Any, slot: int, node: int) -> set[int]:
    """The nodes that a node's row of the mask shows."""
    words = storage.packed_mask[slot, node].tolist()
    return {32 * place + bit for place, word in enumerate(words) for bit in range(32) if word >> bit & 1}
