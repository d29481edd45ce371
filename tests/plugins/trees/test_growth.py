"""Trees of drafts: which nodes are kept, and how a tree grows."""

from __future__ import annotations

import math
import random
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from d2sd.plugins import dispatch
from d2sd.plugins.trees import (
    Branches,
    Draft,
    Source,
    Tree,
    best_first_tree,
    from_candidates,
    from_chain,
    max_nodes,
    replace_rows,
)
from tests.runtime import oracle
from tests.runtime.drafts import NONSENSE, Passes, batch_of, check_best, draft_of, nodes_of, passes
from tests.runtime.helpers import STEADY
from tests.runtime.oracle import Node, best_first

EVERYTHING = 10**6


def grown(made: Passes, rows: int) -> Tree:
    return best_first_tree(made.batch.anchor, made.sources, rows)


@STEADY
@given(passes(), st.integers(1, 150))
def test_one_pass_equals_a_heap(made: Passes, rows: int) -> None:
    """Draws have one request or several; with equal scores, certain tokens, tokens not proposed, rows to spare."""
    tree = best_first_tree(made.batch.anchor, [Source(made.first)], rows)
    assert tree.tokens.shape == (len(made), rows)
    for row in range(len(made)):
        check_best(nodes_of(tree, row), best_first(made.anchor(row), made.slots(row), EVERYTHING), rows)
    assert tree.num_merged.tolist() == [0] * len(made)


@STEADY
@given(passes(), st.integers(1, 150))
def test_two_passes_equal_a_heap(made: Passes, rows: int) -> None:
    tree = grown(made, rows)
    for row in range(len(made)):
        everything = best_first(made.anchor(row), made.slots(row), EVERYTHING, made.behind(row))
        check_best(nodes_of(tree, row), everything, rows)


@pytest.mark.slow
@STEADY
@given(passes(slots=3, requests=2), passes(slots=3, requests=2, width=2), st.integers(1, 150))
def test_a_third_source_beside_two_passes_equals_a_heap(made: Passes, copied: Passes, rows: int) -> None:
    """Fewer candidates a slot, at the root and behind nodes, of which many are those of the passes."""
    first, second = copied.sources
    alone, both = [*made.sources, first], [*made.sources, first, second]
    for sources in (alone, both):
        tree = best_first_tree(made.batch.anchor, sources, rows)
        for row in range(len(made)):
            beside = [(copied.slots(row), copied.behind(row) if sources is both else [])]
            everything = best_first(made.anchor(row), made.slots(row), EVERYTHING, made.behind(row), beside)
            check_best(nodes_of(tree, row), everything, rows)


def likely(dice: random.Random, slots: int, width: int) -> list[list[tuple[int, float]]]:
    """Candidates as a drafter gives them: of 64 tokens, falling probabilities, in multiples of 2^-16."""

    def slot() -> list[tuple[int, float]]:
        scores = sorted((-dice.expovariate(0.5) for _ in range(width)), reverse=True)
        return [(t, round(s * 2**16) / 2**16) for t, s in zip(dice.sample(range(64), width), scores, strict=True)]

    return [slot() for _ in range(slots)]


@pytest.mark.parametrize("seed", range(4))
def test_as_large_as_it_is_served(seed: int) -> None:
    """Seven slots, sixteen candidates, seven branches behind nodes of the first tree, 64 rows, three requests."""
    dice = random.Random(seed)
    firsts = [likely(dice, 7, 16) for _ in range(3)]
    kept, seconds = [], []
    for first in firsts:
        nodes = best_first(5, first, 40)[1:]
        paths = [node.path[1:] for node in dice.sample(nodes, 7)]
        kept.append(paths)
        seconds.append([[[NONSENSE] * 16] * len(p) + likely(dice, 7 - len(p), 16) for p in paths])
    length = torch.tensor([[len(p) for p in paths] for paths in kept])
    tokens = torch.tensor([[[*p, *[0] * (7 - len(p))] for p in paths] for paths in kept])
    made = Passes(
        batch_of([5] * 3, [0] * 3, [0] * 3),
        (0, 0, 0),
        draft_of(firsts),
        Branches(tokens, length, torch.full_like(length, -1)),
        draft_of(seconds),
    )
    tree = grown(made, 64)
    for row in range(3):
        found = nodes_of(tree, row)
        check_best(found, best_first(5, made.slots(row), 200, made.behind(row)), 64)
        assert {node.branch_id for node in found} > {0}
        assert max(len(node.path) for node in found) > 3


A, B, C = math.log(0.5), math.log(0.25), math.log(0.125)


def test_the_likelier_of_equal_children_stays_and_of_equals_the_earlier_lane_s() -> None:
    first = draft_of([[[(1, A), (2, C)], [(3, A), (4, C)]]])
    copy = draft_of([[[(2, B)], [(3, A)]]])
    tree = best_first_tree(torch.tensor([0]), [Source(first), Source(copy)], 64)
    assert [(node.path, node.branch_id) for node in nodes_of(tree, 0)] == [
        ((0,), 0),
        ((0, 1), 0),
        ((0, 2), 1),
        ((0, 1, 3), 0),
        ((0, 2, 3), 0),
        ((0, 1, 4), 0),
        ((0, 2, 4), 0),
    ]


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
    """Return scores that differ in all paths of candidates, so that a node shows whose it has; the second has none.

    A node without a score is none: no source proposed it.
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


@pytest.mark.slow
@STEADY
@given(candidate_sets(), st.integers(1, 30), st.randoms(use_true_random=False))
def test_nodes_that_are_not_kept_make_room_for_later_ones(
    candidates: list[list[list[int]]], budget: int, dice: random.Random
) -> None:
    """A third of the last request's nodes goes, and with each all behind it; the others keep every bit."""
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
    for field in fields(Tree)[:-1]:  # its rows are given by who verifies it
        assert getattr(tree, field.name)[:last].equal(getattr(usual, field.name)[:last]), field.name


def merged(candidates: list[list[list[int]]] | Tensor, budget: int) -> Tree:
    tokens = torch.as_tensor(candidates)
    return from_candidates(tokens, torch.zeros(tokens.shape), budget)


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


@pytest.mark.parametrize(("branches", "copies", "fits"), [(51, 0, True), (52, 0, False), (44, 1, True), (45, 1, False)])
def test_kernels_are_not_asked_for_paths_of_more_than_64_bits(
    branches: int, copies: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six of each lane and of the last row, and one of each row."""
    reasons = list[str | None]()

    def asked(op: str, x: Tensor, *, reason: str | None, **_: object) -> bool:
        reasons.append(reason)
        return False

    monkeypatch.setattr(dispatch, "use_kernels", asked)
    at = torch.zeros(1, branches, 2, dtype=torch.long)
    draft = Draft(torch.zeros(1, 2, 1, dtype=torch.long), torch.zeros(1, 2, 1))
    second = Draft(at[..., None], torch.zeros(1, branches, 2, 1))
    sources = [Source(draft), Source(second, Branches(at, at[..., 0], at[..., 0] - 1), replaces=True)]
    best_first_tree(torch.tensor([7]), sources + [Source(draft, follows=True)] * copies, 3)
    assert [reason is None for reason in reasons] == [fits]


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
