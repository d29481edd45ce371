from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from d2sd.runtime.tree import Tree, chain, max_nodes, merge
from tests.runtime.helpers import STEADY
from tests.runtime.oracle import slow_tree


@st.composite
def candidate_sets(draw: st.DrawFn) -> list[list[list[int]]]:
    """Requests x candidates x slots over few tokens, so that prefixes collide; slot 0 is the request's anchor."""
    vocab, size, count = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    token = st.integers(0, vocab)
    return [
        [[anchor, *draw(st.lists(token, min_size=size - 1, max_size=size - 1))] for _ in range(count)]
        for anchor in draw(st.lists(token, min_size=1, max_size=2))
    ]


def equals_slow(tree: Tree, candidates: list[list[list[int]]], budget: int) -> None:
    for b, own in enumerate(candidates):
        slow = slow_tree(own, budget)
        assert tree.tokens[b].tolist() == slow.tokens
        assert tree.parent[b].tolist() == slow.parent
        assert tree.depth[b].tolist() == slow.depth
        assert tree.origin[b].tolist() == slow.origin
        assert tree.visible[b].tolist() == slow.visible
        assert tree.valid[b].tolist() == [n < slow.nodes for n in range(budget)]


@STEADY
@given(candidate_sets(), st.integers(1, 30))
def test_merge_equals_a_dictionary_of_paths(candidates: list[list[list[int]]], budget: int) -> None:
    equals_slow(merge(torch.tensor(candidates), budget), candidates, budget)


@STEADY
@given(candidate_sets(), st.integers(1, 30))
def test_what_is_left_is_a_tree(candidates: list[list[list[int]]], budget: int) -> None:
    tree = merge(torch.tensor(candidates), budget)
    for b in range(len(candidates)):
        paths = set()
        for node in range(int(tree.valid[b].sum())):
            parent = int(tree.parent[b, node])
            assert (parent < node and bool(tree.valid[b, parent])) or node == parent == 0
            assert int(tree.depth[b, node]) == (int(tree.depth[b, parent]) + 1 if node else 0)
            paths.add((parent, int(tree.tokens[b, node])) if node else "root")
        assert len(paths) == int(tree.valid[b].sum())  # siblings differ
        assert tree.valid[b].tolist() == sorted(tree.valid[b].tolist(), reverse=True)


def test_example_of_the_docstring() -> None:
    anchor, b, c, d, x, y, z = range(7)
    candidates = [[[anchor, b, c, d], [anchor, b, x, y], [anchor, b, x, z]]]
    tree = merge(torch.tensor(candidates), 8)
    assert tree.tokens[0].tolist() == [anchor, b, c, d, x, y, z, 0]
    assert tree.parent[0].tolist() == [0, 0, 1, 2, 1, 4, 4, 0]
    assert tree.origin[0].tolist() == [0, 0, 0, 0, 1, 1, 2, 0]
    assert tree.valid[0].tolist() == [True] * 7 + [False]
    assert tree.visible[0, 6].nonzero().flatten().tolist() == [0, 1, 4, 6]
    assert tree.visible[0, 7].nonzero().flatten().tolist() == [7]


def test_chain_is_the_tree_of_one_candidate() -> None:
    tokens = torch.tensor([[3, 1, 1, 2], [0, 0, 0, 0]])
    equals_slow(chain(tokens), tokens[:, None].tolist(), 4)
    bare = chain(torch.tensor([[9], [8]]))
    assert bare.visible.tolist() == [[[True]], [[True]]]
    assert bare.valid.all()


def branches_at(boundaries: tuple[int, ...], size: int) -> Tensor:
    """A first draft and one branch a boundary, all tokens behind the boundaries different."""
    first = list(range(size))
    return torch.tensor(
        [[first, *(first[: i + 1] + [100 * (n + 1) + s for s in range(i + 1, size)] for n, i in enumerate(boundaries))]]
    )


@pytest.mark.parametrize(
    ("boundaries", "nodes"), [((0, 1, 2, 3), 70), ((2, 5, 8, 11), 50), ((2, 5, 8, 12), 49), ((10, 12, 13, 14), 27)]
)
def test_worked_counts(boundaries: tuple[int, ...], nodes: int) -> None:
    for order in (boundaries, boundaries[::-1]):
        assert int(merge(branches_at(order, 16), 80).valid.sum()) == nodes


@pytest.mark.parametrize(("size", "branches"), [(16, 4), (8, 4), (4, 3), (2, 1), (5, 1)])
def test_max_nodes_is_reached_and_never_exceeded(size: int, branches: int) -> None:
    most = max_nodes(size, branches)
    worst = branches_at(tuple(range(branches)), size)
    assert int(merge(worst, most).valid.sum()) == most
    assert int(merge(worst, most + 10).valid.sum()) == most
    dice = torch.Generator().manual_seed(0)
    for _ in range(20):
        picked = torch.randperm(size - 1, generator=dice)[:branches].tolist()
        assert int(merge(branches_at(tuple(picked), size), most + 10).valid.sum()) <= most


def test_requests_of_a_batch_do_not_mix() -> None:
    one, other = branches_at((0, 2), 5), branches_at((1, 3), 5)
    both = merge(torch.cat([one, other]), 12)
    for b, own in enumerate((one, other)):
        alone = merge(own, 12)
        assert torch.equal(both.tokens[b], alone.tokens[0])
        assert torch.equal(both.visible[b], alone.visible[0])
