from __future__ import annotations

import math
import random
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from d2sd.plugins.trees import Tree, from_candidates, from_chain, max_nodes, replace_rows
from tests.runtime import oracle
from tests.runtime.drafts import nodes_of
from tests.runtime.helpers import STEADY
from tests.runtime.oracle import Node


@st.composite
def candidate_sets(draw: st.DrawFn) -> list[list[list[int]]]:
    """Requests x candidates x slots over few tokens, so that prefixes collide; slot 0 is the request's anchor."""
    vocab, size, count = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    token = st.integers(0, vocab)
    return [
        [[anchor, *draw(st.lists(token, min_size=size - 1, max_size=size - 1))] for _ in range(count)]
        for anchor in draw(st.lists(token, min_size=1, max_size=2))
    ]


def scores_for(candidates: list[list[list[int]]]) -> list[list[list[float]]]:
    """Of each candidate's paths, all different, so that it shows whose a node carries; the second candidate has none.

    A node without a score is a node all the same: its candidate has put it there.
    """

    def score(request: int, candidate: int, slot: int) -> float:
        return -math.inf if candidate == 1 and slot else -100.0 * request - 10.0 * candidate - slot

    return [
        [[score(b, c, g) for g in range(len(one))] for c, one in enumerate(own)] for b, own in enumerate(candidates)
    ]


@STEADY
@given(candidate_sets(), st.integers(1, 30))
def test_merge_equals_a_dictionary_of_paths(candidates: list[list[list[int]]], budget: int) -> None:
    scores = scores_for(candidates)
    tree = from_candidates(torch.tensor(candidates), torch.tensor(scores), budget)
    for b, own in enumerate(candidates):
        nodes, merged = oracle.from_candidates(own, scores[b], budget)
        assert nodes_of(tree, b) == nodes
        assert int(tree.num_merged[b]) == merged


@STEADY
@given(candidate_sets(), st.integers(1, 30), st.integers(0, 10))
def test_fewer_rows_are_the_beginning_of_more(candidates: list[list[list[int]]], budget: int, more: int) -> None:
    tokens, scores = torch.tensor(candidates), torch.tensor(scores_for(candidates))
    small, large = (from_candidates(tokens, scores, rows) for rows in (budget, budget + more))
    for b in range(len(candidates)):
        assert nodes_of(small, b) == nodes_of(large, b)[:budget]


@STEADY
@given(candidate_sets(), st.integers(1, 30), st.randoms(use_true_random=False))
def test_nodes_that_are_not_kept_make_room_for_later_ones(
    candidates: list[list[list[int]]], budget: int, dice: random.Random
) -> None:
    """Of the last request a third of the nodes goes, and with each all behind it; the others keep every bit."""
    tokens, scores = torch.tensor(candidates), torch.tensor(scores_for(candidates))
    usual, larger = (from_candidates(tokens, scores, rows) for rows in (budget, max(budget, 21)))
    last = len(candidates) - 1
    nodes = nodes_of(larger, last)
    left = {node.path for node in nodes[:1]}
    for node in nodes[1:]:
        if node.path[:-1] in left and dice.random() < 0.7:
            left.add(node.path)
    kept = torch.zeros(1, larger.tokens.shape[1], dtype=torch.bool)
    kept[0, : len(nodes)] = torch.tensor([node.path in left for node in nodes])
    tree = replace_rows(usual, torch.tensor([last]), larger, kept)
    assert nodes_of(tree, last) == [node for node in nodes if node.path in left][:budget]
    for field in fields(Tree):
        assert getattr(tree, field.name)[:last].equal(getattr(usual, field.name)[:last]), field.name


def merged(candidates: list[list[list[int]]] | Tensor, budget: int) -> Tree:
    tokens = torch.as_tensor(candidates)
    return from_candidates(tokens, torch.zeros(tokens.shape), budget)


def test_example_of_the_docstring() -> None:
    anchor, b, c, d, x, y, z = range(7)
    tree = merged([[[anchor, b, c, d], [anchor, b, x, y], [anchor, b, x, z]]], 8)
    assert tree.tokens[0].tolist() == [anchor, b, c, d, x, y, z, 0]
    assert tree.parent[0].tolist() == [0, 0, 1, 2, 1, 4, 4, 0]
    assert tree.branch_id[0].tolist() == [0, 0, 0, 0, 1, 1, 2, 0]
    assert tree.valid[0].tolist() == [True] * 7 + [False]
    assert tree.attn_mask[0, 6].nonzero().flatten().tolist() == [0, 1, 4, 6]
    assert tree.attn_mask[0, 7].nonzero().flatten().tolist() == [7]
    assert tree.num_merged.tolist() == [5]  # A and b twice, x once


def test_chain_is_the_tree_of_one_candidate() -> None:
    tokens, scores = torch.tensor([[3, 1, 1, 2], [0, 0, 0, 0]]), torch.tensor([[0.0, -1, -2, -3], [0, -0.5, -4, -9]])
    tree = from_chain(tokens, scores)
    for b in range(2):
        assert nodes_of(tree, b) == oracle.from_candidates([tokens[b].tolist()], [scores[b].tolist()], 4)[0]
    assert tree.num_merged.tolist() == [0, 0]


@STEADY
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 5))
def test_chain_ends_where_nothing_is_proposed(drafts: list[int], size: int) -> None:
    """Requests of one batch at different lengths; what stands behind the end is forgotten."""
    tokens = torch.arange(1, size + 1).repeat(len(drafts), 1)
    scores = torch.tensor([[-float(s) if s <= end else -math.inf for s in range(size)] for end in drafts])
    tree = from_chain(tokens, scores)
    for b, end in enumerate(drafts):
        count = min(end + 1, size)
        expected = [Node(tuple(range(1, n + 2)), 0, -float(n)) for n in range(count)]
        assert nodes_of(tree, b) == expected


def test_bare_anchors() -> None:
    tree = from_chain(torch.tensor([[9], [8]]), torch.zeros(2, 1))
    assert [nodes_of(tree, b) for b in range(2)] == [[Node((9,), 0, 0.0)], [Node((8,), 0, 0.0)]]


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
        assert int(merged(branches_at(order, 16), 80).valid.sum()) == nodes


@pytest.mark.parametrize(("size", "branches"), [(16, 4), (8, 4), (4, 3), (2, 1), (5, 1)])
def test_max_nodes_is_reached_and_never_exceeded(size: int, branches: int) -> None:
    most = max_nodes(size, branches)
    worst = branches_at(tuple(range(branches)), size)
    assert int(merged(worst, most).valid.sum()) == most
    assert int(merged(worst, most + 10).valid.sum()) == most
    dice = torch.Generator().manual_seed(0)
    for _ in range(20):
        picked = torch.randperm(size - 1, generator=dice)[:branches].tolist()
        assert int(merged(branches_at(tuple(picked), size), most + 10).valid.sum()) <= most
