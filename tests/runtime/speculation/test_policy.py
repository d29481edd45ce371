"""Every policy's tree against the same tree built from dictionaries, heaps and scalars."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d2sd.errors import RecipeError
from d2sd.plugins.choice import WIDTH
from d2sd.plugins.trees import Draft
from d2sd.policies import MAX_NODES, NAMES, DrafterRole, DraftUse, FirstPass, PolicyName
from d2sd.runtime.decode import sources_of
from d2sd.runtime.speculation.policy import Policy, make_policy
from tests.runtime import oracle
from tests.runtime.drafts import Passes, check_best, nodes_of, passes
from tests.runtime.helpers import STEADY
from tests.runtime.oracle import Node

FIRST, SECOND = DrafterRole
GROWN: tuple[PolicyName, ...] = ("ddtree", "hybrid")
PICKING: tuple[PolicyName, ...] = ("reanchor", "d2sd", "hybrid")


def made_for(name: PolicyName, made: Passes, budget: int) -> Policy:
    """The policy for drafts of that size; more branches than boundaries are refused, so there may be fewer."""
    block = made.first.tokens.shape[1] + 1
    count = min(made.count, block - 1) if name in ("reanchor", "d2sd") else made.count
    return make_policy(name, block_size=block, branches=count, row_budget=budget)


def slow(policy: Policy, made: Passes, row: int) -> list[Node]:
    """The whole tree of one request, as if there were rows enough."""
    anchor, first, behind = made.anchor(row), made.slots(row), made.behind(row)
    if policy.name in GROWN:
        return oracle.best_first(anchor, first, 10**6, behind if policy.name == "hybrid" else ())
    candidates = [[slot[0] for slot in first]]
    if policy.name == "off":
        candidates = [[]]
    if policy.name in ("reanchor", "d2sd"):
        for kept, slots in behind:
            own = [(token, candidates[0][place][1]) for place, token in enumerate(kept)]
            for place in range(len(kept), len(slots)):
                token, logprob = slots[place][0]
                if place == len(kept):  # said given that the draft here is wrong
                    said = min(candidates[0][place][1], -1e-7)  # nobody is surer than that
                    logprob += math.log(-math.expm1(said))
                own.append((token, logprob))
            candidates.append(own)
    tokens = [[anchor, *(token for token, _ in own)] for own in candidates]
    scores = [[sum(logprob for _, logprob in own[:n]) for n in range(len(own) + 1)] for own in candidates]
    nodes, _ = oracle.from_candidates(tokens, scores, 10**6)
    return [n for n in nodes if n.score > -math.inf] if policy.name in ("chain", "lookup", "flex_parallel") else nodes


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NAMES)
@STEADY
@given(made=passes(), budget=st.integers(2, 60))
def test_tree_equals_the_slow_one(name: PolicyName, made: Passes, budget: int) -> None:
    """Node by node: path, origin and score; of a batch and with rows to spare."""
    policy = made_for(name, made, budget)
    branches = made.branches if name in PICKING else None
    tree = policy.build(made.batch, sources_of(made.first, branches, made.second if branches else None))
    assert tree.tokens.shape == (len(made), policy.num_nodes)
    assert policy.num_nodes <= budget
    for row in range(len(made)):
        nodes, everything = nodes_of(tree, row), slow(policy, made, row)
        if name in GROWN:
            check_best(nodes, everything, policy.num_nodes)
        else:
            everything = everything[: policy.num_nodes]
            assert [n[:2] for n in nodes] == [n[:2] for n in everything]
            assert [n.score for n in nodes] == pytest.approx([n.score for n in everything], abs=1e-4)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", NAMES)
@STEADY
@given(made=passes(ties=False), budget=st.integers(2, 30), more=st.integers(0, 30))
def test_requests_and_rows_do_not_mix(name: PolicyName, made: Passes, budget: int, more: int) -> None:
    """A request's tree is the same in any company, and with fewer rows the beginning of the larger one.

    Here each policy picks its branches itself, and the second pass repeats the first, each branch a little less sure.
    """

    def built(one: Passes, rows: int) -> list[list[Node]]:
        policy = made_for(name, one, rows)
        assert (policy.second_pass is not None) == (name in PICKING)
        branches = policy.branches(one.batch, one.first) if name in PICKING else None
        doubt = torch.arange(1, policy.num_branches + 1)[:, None, None] / 8
        tokens = one.first.tokens[:, None].expand(-1, policy.num_branches, -1, -1)
        second = Draft(tokens, one.first.logprob[:, None] - doubt)
        tree = policy.build(one.batch, sources_of(one.first, branches, second if branches else None))
        return [nodes_of(tree, row) for row in range(len(one))]

    together, larger = built(made, budget), built(made, budget + more)
    for row in range(len(made)):
        assert built(made.only(row), budget) == [together[row]]
        assert larger[row][:budget] == together[row]


@pytest.mark.parametrize(
    ("name", "drafters", "first", "second", "width", "count", "rows"),
    [
        ("off", (), FirstPass.NONE, None, 1, 0, 1),
        ("lookup", (), FirstPass.PROMPT_LOOKUP, None, 1, 0, 4),
        ("chain", (FIRST,), FirstPass.DRAFTER, None, 1, 0, 4),
        ("reanchor", (FIRST,), FirstPass.DRAFTER, 0, 1, 2, 9),
        ("d2sd", (FIRST, SECOND), FirstPass.DRAFTER, 1, 1, 2, 9),
        ("ddtree", (FIRST,), FirstPass.DRAFTER, None, WIDTH, 0, 64),
        ("hybrid", (FIRST, SECOND), FirstPass.DRAFTER, 1, WIDTH, 2, 64),
        ("flex_parallel", (FIRST,), FirstPass.CARRIED, None, 16, 0, 4),
    ],
)
def test_static_facts(
    name: PolicyName,
    drafters: tuple[DrafterRole, ...],
    first: FirstPass,
    second: int | None,
    width: int,
    count: int,
    rows: int,
) -> None:
    """Merged trees have no more rows than their candidates can fill; grown ones take all they are given."""
    policy = make_policy(name, block_size=4, branches=2, row_budget=64)
    assert (policy.name, policy.drafters, policy.first_pass, policy.second_pass) == (name, drafters, first, second)
    assert (policy.topk, policy.num_branches, policy.num_nodes) == (width, count, rows)
    tight = make_policy(name, block_size=4, branches=2, row_budget=3)
    assert (tight.num_nodes, tight.num_branches) == (min(3, rows), count)


def test_every_name_has_its_policy() -> None:
    assert get_args(PolicyName) == NAMES
    assert len(set(NAMES)) == 8
    made = {name: make_policy(name, block_size=4, branches=2, row_budget=64) for name in NAMES}
    assert [policy.name for policy in made.values()] == list(NAMES)
    assert len(set(made.values())) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [-1, 0, 1, MAX_NODES + 1, 10**9])
def test_no_rows_for_a_tree(name: PolicyName, budget: int) -> None:
    if name == "off":
        assert make_policy(name, block_size=8, branches=2, row_budget=budget).num_nodes == 1
        return
    with pytest.raises(RecipeError, match="node budget") as caught:
        make_policy(name, block_size=8, branches=2, row_budget=budget)
    assert (caught.value.where, caught.value.found) == ("tree.row_budget", budget)


@pytest.mark.parametrize("name", ["reanchor", "d2sd"])
@pytest.mark.parametrize("branches", [-1, 0, 8, 9])
def test_branches_out_of_range(name: PolicyName, branches: int) -> None:
    with pytest.raises(RecipeError, match="boundaries") as caught:
        make_policy(name, block_size=8, branches=branches, row_budget=64)
    assert (caught.value.where, caught.value.found) == ("tree.branches", branches)


@pytest.mark.parametrize("name", ["reanchor", "d2sd"])
@pytest.mark.parametrize("branches", [1, 7])
def test_branches_at_the_ends_of_the_range(name: PolicyName, branches: int) -> None:
    assert make_policy(name, block_size=8, branches=branches, row_budget=64).num_branches == branches


def test_hybrid_may_have_more_branches_than_drafts() -> None:
    assert make_policy("hybrid", block_size=8, branches=20, row_budget=64).num_branches == 20


def test_the_first_drafter_makes_both_passes_without_a_second() -> None:
    policy = make_policy("hybrid", block_size=8, branches=2, row_budget=64).among([FIRST])
    assert (policy.drafters, policy.second_pass, policy.second_use) == ((FIRST,), FIRST, DraftUse.SECOND)


@pytest.mark.parametrize("name", ["off", "lookup", "chain", "ddtree"])
def test_branches_are_nothing_to_policies_without_any(name: PolicyName) -> None:
    assert make_policy(name, block_size=8, branches=99, row_budget=64).num_branches == 0
