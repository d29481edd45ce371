"""A tree in a slot: mask, positions and links describe one tree, and no other slot changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from d2sd.integrations.trtllm.tree_slots import pack_bits, store_tree
from d2sd.plugins.trees import Tree
from tests.d2sd.integrations.trtllm.standin.slots import DynamicTreeSlotStorage

FIELDS = (
    "packed_mask",
    "position_offsets",
    "retrieve_index",
    "retrieve_next_token",
    "retrieve_next_sibling",
    "has_tree",
)


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


def check_random_trees(count: int, seed: int) -> None:
    """Random trees of random sizes into random slots of storages of up to 130 nodes."""
    dice = random.Random(seed)
    stored = 0
    while stored < count:
        nodes = dice.choice([2, 5, 15, 31, 32, 33, 40, 64, 65, 70, 128, 130])
        storage = DynamicTreeSlotStorage(6, nodes, -(-nodes // 32))
        for _ in range(12):
            batch = dice.randint(1, 4)
            tree = random_tree(dice, dice.randint(1, nodes), batch)
            slots = torch.tensor(dice.sample(range(6), batch))
            before = {name: getattr(storage, name).clone() for name in FIELDS}
            drafts = store_tree(storage, slots, tree)
            assert drafts.dtype == torch.int32
            assert drafts.shape == (batch, nodes - 1)
            others = sorted(set(range(7)) - set(slots.tolist()))
            for name in FIELDS:
                assert torch.equal(getattr(storage, name)[others], before[name][others]), name
            for row, slot in enumerate(slots.tolist()):
                expected = paths_of(tree, row)
                assert storage.has_tree[slot]
                assert paths_by_links(storage, slot, drafts[row].tolist()) == expected
                assert storage.retrieve_index[slot].tolist() == list(range(nodes))
                for node in range(nodes):
                    ancestors = {n for n, path in expected.items() if path == expected.get(node, (None,))[: len(path)]}
                    real = node in expected
                    assert visible_by_bits(storage, slot, node) == (ancestors if real else {node})
                    assert storage.position_offsets[slot, node] == (len(expected[node]) if real else 0)
            stored += batch


@pytest.mark.slow
def test_random_trees() -> None:
    """`make trtllm` has ten thousand."""
    check_random_trees(300, seed=0)


def test_the_dummy_slot_never_has_a_tree() -> None:
    storage = DynamicTreeSlotStorage(2, 4, 1)
    tree = random_tree(random.Random(0), 4, 3)
    store_tree(storage, torch.tensor([0, 2, 2]), tree)
    assert storage.has_tree.tolist() == [True, False, False]


def test_bits_of_words() -> None:
    bits = torch.zeros(2, 33, dtype=torch.bool)
    bits[0, [0, 31]] = bits[1, 32] = True
    assert pack_bits(bits, 2).tolist() == [[1 - 2**31, 0], [0, 1]]
    assert pack_bits(torch.ones(1, 32, dtype=torch.bool), 1).tolist() == [[-1]]
