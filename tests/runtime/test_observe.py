"""Observations of a step equal those of a loop over paths of tokens."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d2sd.plugins.choice import WIDTH
from d2sd.plugins.lookup import Copy
from d2sd.plugins.trees import Branches, Draft, accept, from_chain
from d2sd.policies import NAMES, DrafterRole, DraftUse, PolicyName
from d2sd.runtime.decode import StepTrace, sources_of
from d2sd.runtime.observe import CopyOutcome, NodeOutcome, StepObservation, observe
from d2sd.runtime.request import Request
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.speculation.policy import DDTree, Lookup, Off, Policy, make_policy
from d2sd.runtime.stats import Clock, SequenceStats, calibration_error, mean_tau, reliability_bins
from tests.runtime.drafts import NONSENSE, Passes, batch_of, draft_of, nodes_of, passes
from tests.runtime.helpers import STEADY
from tests.runtime.oracle import Path


def sequences(count: int) -> tuple[Sequence, ...]:
    return tuple(Sequence(n, Request((0,)), [0]) for n in range(count))


def finite(draft: Draft) -> Draft:
    """Everything is proposed: -inf is what a drafter never says of a slot's best."""
    return Draft(draft.tokens, draft.logprob.clamp(min=-9.0))


def trace_of(made: Passes, policy: Policy, agree: float, seed: int, active: int) -> StepTrace:
    """A step whose target agrees with each node's likeliest child, or some other, as the dice say."""
    dice = random.Random(seed)
    first = None if isinstance(policy, Off) else made.first
    branches = made.branches if policy.second_pass is not None else None
    second = made.second if policy.second_pass is not None else None
    tree = policy.build(made.batch, sources_of(first, branches, second))
    chosen = torch.full_like(tree.tokens, 99)
    for row in range(len(made)):
        for node in range(1, int(tree.valid[row].sum())):
            if chosen[row, tree.parent[row, node]] == 99 and dice.random() < agree:
                chosen[row, tree.parent[row, node]] = tree.tokens[row, node]
    longest = made.first.tokens.shape[1] + 1
    return StepTrace(sequences(active), policy, first, branches, tree, accept(tree, chosen, longest))


def use_of(policy: PolicyName, *, redrafted: bool) -> DraftUse:
    if policy in ("chain", "reanchor", "d2sd", "flex_parallel"):
        return DraftUse[policy.upper()] if redrafted else DraftUse.CHAIN
    return DraftUse.SECOND if redrafted else DraftUse.FIRST


def slowly(trace: StepTrace, row: int) -> StepObservation:
    """The definitions, word by word."""
    nodes = nodes_of(trace.tree, row)
    by_path = {node.path: node for node in nodes}
    count = int(trace.accepted.count[row])
    deepest = nodes[int(trace.accepted.path[row, count - 1])].path
    path = [deepest[:n] for n in range(1, len(deepest) + 1)]
    truth = [*deepest[1:], int(trace.accepted.tokens[row, count - 1])]
    best = [] if trace.first is None else trace.first.tokens[row, :, 0].tolist()
    chain = 0
    while chain < min(len(best), count) and best[chain] == truth[chain]:
        chain += 1
    starts: list[list[int]] = []
    if trace.branches is not None:
        rows = zip(trace.branches.tokens[row].tolist(), trace.branches.prefix_len[row].tolist(), strict=True)
        starts = [tokens[:length] for tokens, length in rows]
    rank = next((n for n, start in enumerate(starts) if start == best[:chain]), None)
    judged, parents = [], list[tuple[Path, int]]()
    for number, node in enumerate(nodes[1:], 1):
        above = node.path[:-1]
        slot = len(node.path) - 2
        redrafted = trace.policy.second_pass is not None and node.branch_id > 0
        distance = slot - len(starts[node.branch_id - 1]) if redrafted else slot
        logprob = node.score - by_path[above].score
        rejects = redrafted and distance == 0 and trace.policy.name in ("reanchor", "d2sd")
        if rejects and trace.first is not None:
            taken = math.exp(min(float(trace.first.logprob[row, slot, 0]), -1e-7))
            logprob = min(0.0, logprob - math.log1p(-taken))
        if above in path and not (rejects and chain > slot):
            judged.append(
                NodeOutcome(
                    use=use_of(trace.policy.name, redrafted=redrafted),
                    distance=distance,
                    sibling=(above, node.branch_id) in parents,
                    logprob=logprob,
                    accepted=node.path in path,
                    node=number,
                )
            )
        parents.append((above, node.branch_id))
    merged = int(trace.tree.num_merged[row])
    rescued = trace.policy.second_pass is not None and by_path[deepest].branch_id > 0 and len(path) - 1 > chain
    nodes_on = [number for number, node in enumerate(nodes) if number and node.path in path]
    return StepObservation(
        trace.sequences[row], len(path), chain, len(nodes), merged, rank, rescued, nodes_on, judged, []
    )


def check(trace: StepTrace) -> list[StepObservation]:
    found = observe(trace)
    assert len(found) == len(trace.sequences)
    for row, one in enumerate(found):
        wanted = slowly(trace, row)
        assert [n._replace(logprob=0.0) for n in one.judged] == [n._replace(logprob=0.0) for n in wanted.judged]
        assert [n.logprob for n in one.judged] == pytest.approx([n.logprob for n in wanted.judged], abs=1e-4)
        assert replace(one, judged=[]) == replace(wanted, judged=[])
        assert sum(node.accepted for node in one.judged) == one.accepted - 1
    return found


@STEADY
@given(passes(ties=False), st.sampled_from(NAMES), st.integers(2, 40), st.sampled_from([0.2, 0.6, 1.0]), st.integers())
def test_equals_a_loop_over_paths(made: Passes, name: PolicyName, rows: int, agree: float, seed: int) -> None:
    made = replace(made, first=finite(made.first), second=finite(made.second))
    slots = made.first.tokens.shape[1]
    policy = make_policy(name, block_size=max(slots, made.count) + 1, branches=made.count, row_budget=rows)
    check(trace_of(made, policy, agree, seed, active=len(made)))


@pytest.mark.parametrize("name", NAMES)
def test_everything_occurs(name: PolicyName) -> None:
    """The loop above is no use if no step has a branch that wins: seven slots, sixteen candidates, four branches."""
    dice = random.Random(3)
    policy = make_policy(name, block_size=8, branches=4, row_budget=64)
    found: list[StepObservation] = []
    for seed in range(8):

        def slot() -> list[tuple[int, float]]:
            return [(t, -dice.random() - n) for n, t in enumerate(dice.sample(range(64), WIDTH))]

        first = draft_of([[slot() for _ in range(7)] for _ in range(3)])
        length = torch.tensor([dice.sample(range(1, 6), 4) for _ in range(3)])
        second = [[[[NONSENSE] * WIDTH] * n + [slot() for _ in range(7 - n)] for n in own] for own in length.tolist()]
        branches = Branches(first.top1[:, None].expand(-1, 4, -1), length, torch.full_like(length, -1))
        made = Passes(batch_of([1] * 3, [0] * 3, [0] * 3), (0, 0, 0), first, branches, draft_of(second))
        found += check(trace_of(made, policy, 0.6, seed, active=2))  # the third row is padding
    assert len(found) == 16
    judged = [node for one in found for node in one.judged]
    assert any(one.rank is not None for one in found) == (policy.second_pass is not None)
    assert {node.drafter for node in judged} == (
        set() if name == "off" else {DrafterRole.FIRST, policy.second_pass or DrafterRole.FIRST}
    )
    assert any(one.rescued for one in found) == (policy.second_pass is not None)
    assert any(one.accepted - 1 > one.chain for one in found) == (
        name not in ("off", "lookup", "chain", "flex_parallel")
    )
    if name in ("ddtree", "hybrid"):
        assert {node.sibling for node in judged if node.accepted} == {True, False}


A, B = math.log(0.5), math.log(0.25)


def test_what_lookup_did_not_find_is_not_judged() -> None:
    first = draft_of([[[(1, 0.0)], [(0, -math.inf)]]])
    policy, batch = Lookup(3), batch_of([0], [0], [0])
    tree = policy.build(batch, sources_of(first))
    (one,) = observe(StepTrace(sequences(1), policy, first, None, tree, accept(tree, torch.tensor([[1, 0, 9]]), 3)))
    assert (one.accepted, one.nodes, [node.prob for node in one.judged]) == (2, 2, [1.0])


@pytest.mark.parametrize("said", [0.0, -1e-9])
def test_a_certain_draft_that_was_wrong_is_a_number(said: float) -> None:
    """fp32 rounds a confident drafter's word to exactly 1; then the branch behind it had no chance, and won."""
    first = draft_of([[[(1, said)], [(2, A)], [(3, A)]]])
    branches = Branches(torch.tensor([[[1, 2, 3]]]), torch.tensor([[0]]), torch.tensor([[1]]))
    second = draft_of([[[[(5, A)], [(6, A)], [(7, A)]]]])
    policy, batch = make_policy("d2sd", block_size=4, branches=1, row_budget=8), batch_of([0], [0], [0])
    tree = policy.build(batch, sources_of(first, branches, second))
    chosen = torch.full_like(tree.tokens, 99)
    for node in range(1, 7):
        if int(tree.tokens[0, node]) in (5, 6, 7):
            chosen[0, tree.parent[0, node]] = tree.tokens[0, node]
    (one,) = observe(StepTrace(sequences(1), policy, first, branches, tree, accept(tree, chosen, 4)))
    assert one.accepted == 4
    assert [0 <= node.prob <= 1 for node in one.judged] == [True] * 4, [node.prob for node in one.judged]


def stats(*steps: tuple[int, int]) -> SequenceStats:
    """From (tokens of the step, origin of its path's end)."""
    made = SequenceStats()
    for accepted, accepted_branch in steps:
        made.record(accepted, accepted_branch, rows=7, policy="d2sd")
    return made


def test_counts_of_one_request() -> None:
    one = stats((1, 0), (4, 2), (2, 0), (1, 3))
    assert (one.steps, one.tokens, one.verified_nodes) == (4, 8, 28)
    assert one.tau == 2.0
    assert one.accepted_branches == Counter({2: 1, 0: 1})  # steps without an accepted draft have no winner
    assert one.joint_acceptance() == [2 / 4, 1 / 4, 1 / 4]


def test_nothing_done_yet() -> None:
    none = SequenceStats()
    assert none.tau == 0.0
    assert none.joint_acceptance() == []
    assert mean_tau([]) == 0.0
    assert SequenceStats.merged([]).tau == 0.0


def test_merged_weighs_steps_and_the_mean_weighs_requests() -> None:
    short, long = stats((4, 1)), stats((1, 0), (1, 0), (2, 1))
    merged = SequenceStats.merged([short, long])
    assert merged.tau == 8 / 4
    assert mean_tau([short, long]) == pytest.approx((4 + 4 / 3) / 2)
    assert merged.accepted == Counter({4: 1, 1: 2, 2: 1})
    assert merged.accepted_branches == Counter({1: 2})
    assert merged.verified_nodes == 28
    assert short.tokens == 4  # what was merged stays as it was


def test_merged_preemptions_and_requests_without_a_step() -> None:
    waited, ran = SequenceStats(preemptions=2), stats((3, 1))
    assert SequenceStats.merged([waited, ran]).preemptions == 2
    assert mean_tau([waited, ran]) == 3.0


def test_clock_adds_up_and_counts_a_stage_that_fails() -> None:
    clock = Clock()
    for _ in range(2):
        with clock.stage("verify"):
            pass
    once = clock.seconds["verify"]
    with pytest.raises(ValueError, match="x"), clock.stage("verify"):
        raise ValueError("x")
    assert clock.seconds["verify"] > once > 0


def test_conditional_acceptance_is_given_the_positions_before() -> None:
    one = SequenceStats()
    for length in (1, 4, 2, 1):
        one.record(length, 0, 8, "chain")
    assert one.conditional_acceptance() == [1 / 2, 1 / 2, 1.0]


def test_calibration_error_by_hand() -> None:
    """Two bins: 0.95 predicted twice and accepted once, 0.25 once and accepted; 1.0 belongs to the last bin."""
    outcomes = [(0.95, True), (0.95, False), (0.25, True)]
    bins = reliability_bins(outcomes)
    assert [n for n, _, _ in bins] == [0, 0, 1, 0, 0, 0, 0, 0, 0, 2]
    assert calibration_error(bins) == pytest.approx((abs(1.9 - 1) + abs(0.25 - 1)) / 3)
    assert calibration_error(reliability_bins([*outcomes, (1.0, True)])) == pytest.approx((0.9 + 0.75) / 4)
    assert calibration_error(reliability_bins([])) is None


@pytest.mark.parametrize(
    ("length", "chosen", "outcomes"),
    [
        (2, [5, 6, 9], [(1, 2, 0, True), (1, 0, 1, True), (1, 0, 2, False)]),
        (40, [5, 9, 9], [(6, 2, 0, True), (6, 0, 1, False)]),
        (1, [8, 6, 7], [(0, 2, 0, False)]),
        (0, [5, 6, 7], []),
    ],
)
def test_copied_tokens_until_one_is_wrong_by_hand(
    length: int, chosen: list[int], outcomes: list[tuple[int, int, int, bool]]
) -> None:
    """The copy says 5 6 7, and the first draft gives 5 a chance of 1 in 20; the tree is the copy."""
    tokens, score = torch.tensor([[1, 5, 6, 7]]), torch.zeros(1, 4)
    tree = from_chain(tokens, score)
    first = Draft(torch.tensor([[[5], [4], [4]]]), torch.tensor([[[0.05], [0.5], [0.5]]]).log())
    copy = Copy(Draft(tokens[:, 1:, None], score[:, 1:, None]), torch.tensor([length]))
    done = accept(tree, torch.tensor([[*chosen, 3]]), 4)
    policy = DDTree(4, lookup=True)
    (one,) = observe(StepTrace(sequences(1), policy, first, None, tree, done, copy))
    assert one.copied == [CopyOutcome(*outcome) for outcome in outcomes]
