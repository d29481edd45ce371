from __future__ import annotations

import pytest
import torch

from d2sd.errors import RecipeError
from d2sd.runtime.boundaries import Draft
from d2sd.runtime.policy import PolicyName, make_policy


def draft(tokens: list[list[int]] | list[list[list[int]]]) -> Draft:
    made = torch.tensor(tokens)
    return Draft(made, torch.ones_like(made, dtype=torch.float32))


ANCHOR = torch.tensor([1, 5])
FIRST = draft([[1, 2, 3, 4], [5, 6, 7, 8]])
SECOND = draft([[[1, 9, 9, 9], [1, 2, 9, 9]], [[5, 6, 7, 9], [5, 6, 9, 9]]])


@pytest.mark.parametrize(
    ("name", "drafters", "branches", "rows"), [("off", 0, 0, 1), ("chain", 1, 0, 4), ("d2sd", 2, 2, 9)]
)
def test_static_facts(name: PolicyName, drafters: int, branches: int, rows: int) -> None:
    policy = make_policy(name, block_size=4, branches=2, row_budget=64)
    assert (policy.drafters, policy.branches, policy.rows) == (drafters, branches, rows)


@pytest.mark.parametrize("name", ["off", "chain", "d2sd"])
def test_tree_has_the_promised_rows(name: PolicyName) -> None:
    policy = make_policy(name, block_size=4, branches=2, row_budget=8)
    tree = policy.build(ANCHOR, FIRST, SECOND)
    assert tree.tokens.shape == (2, policy.rows)
    assert tree.tokens[:, 0].tolist() == [1, 5]


def test_trees() -> None:
    off = make_policy("off", block_size=4, branches=2, row_budget=0).build(ANCHOR, None, None)
    assert off.tokens.tolist() == [[1], [5]]
    chain = make_policy("chain", block_size=4, branches=99, row_budget=4).build(ANCHOR, FIRST, None)
    assert chain.tokens.tolist() == FIRST.tokens.tolist()
    d2sd = make_policy("d2sd", block_size=4, branches=2, row_budget=64).build(ANCHOR, FIRST, SECOND)
    assert d2sd.tokens[0].tolist() == [1, 2, 3, 4, 9, 9, 9, 9, 9]
    assert d2sd.valid.sum(1).tolist() == [9, 7]
    tight = make_policy("d2sd", block_size=4, branches=2, row_budget=6).build(ANCHOR, FIRST, SECOND)
    assert tight.tokens.tolist() == [[1, 2, 3, 4, 9, 9], [5, 6, 7, 8, 9, 9]]
    assert tight.origin.tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 2]]


@pytest.mark.parametrize("name", ["chain", "d2sd"])
def test_budget_smaller_than_a_chain(name: PolicyName) -> None:
    make_policy(name, block_size=8, branches=2, row_budget=8)
    with pytest.raises(RecipeError, match="row budget") as caught:
        make_policy(name, block_size=8, branches=2, row_budget=7)
    assert (caught.value.where, caught.value.found) == ("tree.row_budget", 7)


@pytest.mark.parametrize("branches", [-1, 0, 8, 9])
def test_branches_out_of_range(branches: int) -> None:
    with pytest.raises(RecipeError, match="boundaries") as caught:
        make_policy("d2sd", block_size=8, branches=branches, row_budget=64)
    assert (caught.value.where, caught.value.found) == ("tree.branches", branches)


@pytest.mark.parametrize("branches", [1, 7])
def test_branches_at_the_ends_of_the_range(branches: int) -> None:
    assert make_policy("d2sd", block_size=8, branches=branches, row_budget=64).branches == branches
