"""The likeliest tree against a heap: all nodes of all paths, best first."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d2sd.plugins.trees import Branches, Source, Tree, best_first_tree
from d2sd.runtime.decode import sources_of
from tests.runtime.drafts import NONSENSE, Passes, batch_of, check_best, draft_of, nodes_of, passes, slots_of
from tests.runtime.helpers import STEADY
from tests.runtime.oracle import best_first

EVERYTHING = 10**6


def grown(made: Passes, rows: int) -> Tree:
    return best_first_tree(made.batch.anchor, made.sources, rows)


@STEADY
@given(passes(), st.integers(1, 150))
def test_one_pass_equals_a_heap(made: Passes, rows: int) -> None:
    """Of one request and of several; with equal scores, certain tokens, tokens not proposed, rows to spare."""
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


def test_the_likelier_of_equal_children_stays_and_of_equals_the_earlier_lane_s() -> None:
    first = draft_of([[[(1, A), (2, C)], [(3, A), (4, C)]]])
    copy = draft_of([[[(2, B)], [(3, A)]]])
    tree = best_first_tree(torch.tensor([0]), [Source(first), Source(copy)], 64)
    assert [(node.path, node.branch_id) for node in nodes_of(tree, 0)] == [
        ((0,), 0), ((0, 1), 0), ((0, 2), 1), ((0, 1, 3), 0), ((0, 2, 3), 0), ((0, 1, 4), 0), ((0, 2, 4), 0),
    ]  # fmt: skip


def test_a_source_behind_nodes_alone_proposes_nothing_elsewhere() -> None:
    first = draft_of([[[(1, A), (2, B)], [(3, A), (4, C)]]])
    branches = Branches(torch.tensor([[[2, 9]]]), torch.tensor([[1]]), torch.tensor([[-1]]))
    copy = draft_of([[[[NONSENSE], [(7, A)]]]])
    tree = best_first_tree(torch.tensor([0]), [Source(first), Source(copy, branches)], 64)
    assert [node.path for node in nodes_of(tree, 0) if node.branch_id] == [(0, 2, 7)]


@STEADY
@given(passes(ties=False), st.integers(1, 40), st.integers(0, 40))
def test_fewer_rows_are_the_beginning_of_more(made: Passes, rows: int, more: int) -> None:
    small, large = grown(made, rows), grown(made, rows + more)
    for row in range(len(made)):
        assert nodes_of(small, row) == nodes_of(large, row)[:rows]


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
        batch_of([5] * 3, [0] * 3, [0] * 3), (0, 0, 0), draft_of(firsts),
        Branches(tokens, length, torch.full_like(length, -1)), draft_of(seconds),
    )  # fmt: skip
    tree = grown(made, 64)
    for row in range(3):
        found = nodes_of(tree, row)
        check_best(found, best_first(5, made.slots(row), 200, made.behind(row)), 64)
        assert {node.branch_id for node in found} > {0}
        assert max(len(node.path) for node in found) > 3


A, B, C = math.log(0.5), math.log(0.25), math.log(0.125)


def test_by_hand() -> None:
    """A path goes on as the deepest branch it has passed says, from where it has passed it."""
    first = draft_of([[[(1, A), (2, B)], [(3, A), (4, C)], [(5, A), (6, C)]]])
    branches = Branches(torch.tensor([[[1, 9, 9], [1, 4, 9]]]), torch.tensor([[1, 2]]), torch.tensor([[-1, -1]]))
    second = draft_of([[
        [[NONSENSE] * 2, [(4, A), (7, B)], [(8, A), (9, C)]],
        [[NONSENSE] * 2, [NONSENSE] * 2, [(10, A), (11, B)]],
    ]])  # fmt: skip
    tree = best_first_tree(torch.tensor([0]), sources_of(first, branches, second), 64)
    branch_id = {node.path: node.branch_id for node in nodes_of(tree, 0)}
    assert branch_id == {
        (0,): 0, (0, 1): 0, (0, 2): 0,
        (0, 1, 4): 1, (0, 1, 7): 1, (0, 2, 3): 0, (0, 2, 4): 0,
        (0, 1, 4, 10): 2, (0, 1, 4, 11): 2, (0, 1, 7, 8): 1, (0, 1, 7, 9): 1,
        (0, 2, 3, 5): 0, (0, 2, 3, 6): 0, (0, 2, 4, 5): 0, (0, 2, 4, 6): 0,
    }  # fmt: skip


def test_a_branch_that_keeps_nothing_or_everything_adds_nothing() -> None:
    first = draft_of([[[(1, A), (2, B)], [(3, A), (4, C)]]])
    branches = Branches(torch.tensor([[[1, 3], [1, 3]]]), torch.tensor([[0, 2]]), torch.tensor([[1, -1]]))
    second = draft_of([[[[(5, 0.0), (6, A)]] * 2, [[NONSENSE] * 2] * 2]])
    tree = best_first_tree(torch.tensor([0]), sources_of(first, branches, second), 9)
    assert set(nodes_of(tree, 0)) == set(best_first(0, slots_of(first, 0), 9))


def test_certain_drafts_come_in_order() -> None:
    """All on one path score alike: a parent stands before its child nevertheless."""
    sure = draft_of([[[(s, 0.0), (9, -math.inf)] for s in range(6)]])
    nodes = nodes_of(best_first_tree(torch.tensor([7]), [Source(sure)], 5), 0)
    assert [node.path for node in nodes] == [(7, *range(n)) for n in range(5)]


def test_nothing_proposed_leaves_the_anchor() -> None:
    nothing = draft_of([[[(1, -math.inf), (2, -math.inf)]] * 3])
    assert [node.path for node in nodes_of(best_first_tree(torch.tensor([7]), [Source(nothing)], 5), 0)] == [(7,)]
