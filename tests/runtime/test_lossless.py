"""Speculation changes how fast a text is written, never the text: every way to run equals plain decoding exactly."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from d2sd.policies import FACTS
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.stats import COPY, SequenceStats
from tests.runtime.cheating import CheatingRunner
from tests.runtime.helpers import (
    BLOCK,
    all_pages,
    cheater,
    circling,
    copies,
    expected,
    free_pages,
    last_token_decoder,
    make_engine,
    run_staggered,
    some_requests,
)
from tests.tiny import CASES, greedy_text, policy_name, runner_of, tiny_drafter


@dataclass(frozen=True)
class Way:
    """How the ten requests come in and what room they have."""

    max_batch: int = 4
    page_size: int = 4
    prefill_chunk: int = 16
    pages: int | None = None
    gap: int = 0  # steps between two that join
    shuffled: bool = False
    row_budget: int = 14

    def engine(self, runner: ModelRunner, policy: str, *, lookup: bool = False) -> Engine:
        return make_engine(
            runner,
            policy,
            max_batch=self.max_batch,
            page_size=self.page_size,
            prefill_chunk=self.prefill_chunk,
            pages=self.pages,
            row_budget=self.row_budget,
            lookup=lookup,
        )

    def run(self, engine: Engine, requests: tuple[Request, ...]) -> SequenceStats:
        """Run and compare; returns the sums of what happened."""
        order = list(range(len(requests)))
        if self.shuffled:
            random.Random(3).shuffle(order)
        sequences = run_staggered(engine, requests, order=order, gap=self.gap)
        for request, sequence in zip(requests, sequences, strict=True):
            assert sequence.answer == expected(request)
            assert sequence.finish == "length"
        assert free_pages(engine) == all_pages(engine)
        return SequenceStats.merged(s.stats for s in sequences)


WAYS = {
    "alone": Way(max_batch=1),
    "batch": Way(max_batch=10),
    "in flight": Way(gap=2, shuffled=True),
    "tight pages": Way(pages=16, max_batch=8, shuffled=True),
    "few rows": Way(row_budget=7, max_batch=8),
    "two rows": Way(row_budget=2, max_batch=10),
    "many rows": Way(row_budget=70, max_batch=10),
}
DRAFTING = tuple(name for name in CASES if name not in ("off", "lookup"))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("policy", CASES)
def test_with_drafts_that_are_often_right(policy: str, way: Way) -> None:
    """Paths of every length, siblings and branches are accepted; test_differential.py has all other features."""
    requests = some_requests()
    runner = cheater(requests, policy)
    engine = way.engine(runner, policy)
    stats = way.run(engine, requests)
    rows = engine.policy.num_nodes
    assert rows <= way.row_budget
    assert (stats.preemptions > 0) == (way.pages is not None)
    if policy in ("off", "lookup"):
        assert stats.accepted.keys() <= ({1} if policy == "off" else set(range(1, BLOCK + 1)))
        return
    assert stats.accepted.keys() == set(range(1, min(rows, BLOCK) + 1))  # every length, up to the whole block
    late = policy == "flex_parallel"  # without a draft in its first step
    assert stats.tau > (2 if rows > 2 and not late else 1.5)
    if rows > BLOCK:
        check_what_took_part(policy, stats, runner)


def check_what_took_part(policy: str, stats: SequenceStats, runner: CheatingRunner) -> None:
    """Siblings were accepted where there are any, and branches restarted everywhere and won."""
    boundaries = {"reanchor": range(BLOCK - 1), "d2sd": range(BLOCK - 1), "hybrid": range(1, BLOCK - 1)}.get(policy, ())
    assert runner.boundaries.keys() == set(boundaries)
    assert stats.accepted_branches[0] > 5
    wins, siblings = (
        sum(n for branch_id, n in c.items() if branch_id > 0) for c in (stats.accepted_branches, runner.siblings)
    )
    one_pass = dict.fromkeys(("chain", "ddtree", "flex", "flex_tree", "flex_parallel"), -1)
    assert wins > one_pass.get(policy, 15)
    assert siblings > 2 if policy == "hybrid" else siblings == 0
    assert runner.siblings[0] > 5 if policy in ("ddtree", "flex_tree", "hybrid") else runner.siblings[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", [WAYS["in flight"], WAYS["many rows"]])
def test_a_first_drafter_used_twice_drafts_what_a_second_of_its_weights_does(way: Way) -> None:
    target, first, _, _ = copies()
    twin = tiny_drafter(target.config, block_size=BLOCK, layers=1, role="variable_prefix")
    twin.load_state_dict(first.state_dict())
    steps = []
    for runner in (runner_of(target, first), runner_of(copies()[0], copies()[1], twin)):
        engine = way.engine(runner, "hybrid")
        engine.record_trace = True
        for request in some_requests():
            engine.submit(request)
        trees = []
        while engine.busy:
            engine.step()
            if engine.trace is not None:
                tree = engine.trace.tree
                trees.append([tree.tokens.tolist(), tree.parent.tolist(), tree.branch_id.tolist()])
        steps.append(trees)
        assert max(branch for _, _, branches in trees for row in branches for branch in row) > 0
    assert steps[0] == steps[1]


COPYING = tuple(name for name in CASES if FACTS[policy_name(name)].copies)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("policy", ["lookup", *COPYING])
@pytest.mark.parametrize("seed", [1, 5])
def test_copies_win_where_the_text_repeats(policy: str, seed: int) -> None:
    """The target walks in circles (of four and of two), behind drafters that are hardly ever right, in flight and
    preempted; what followed once follows again, past the end of the text.
    """
    requests = tuple(Request((n, 2 * n), 40, SamplingParams(seed=n)) for n in range(7))
    runner = circling(policy, BLOCK, seed=seed)
    texts = [greedy_text(last_token_decoder(seed), list(r.prompt), 40) for r in requests]
    engine = Way(pages=20, max_batch=6).engine(runner, policy, lookup=policy != "lookup")
    sequences = run_staggered(engine, requests, gap=2)
    assert [s.answer for s in sequences] == texts
    assert sum(s.stats.preemptions for s in sequences) > 0
    stats = SequenceStats.merged(s.stats for s in sequences)
    assert stats.accepted_branches[0 if policy == "lookup" else COPY] > 20
    assert max(stats.accepted) == BLOCK
    assert stats.tau > 2


@pytest.mark.slow
def test_branches_and_siblings_gain_what_the_chain_misses() -> None:
    requests, way = some_requests(), WAYS["batch"]
    tau = {policy: way.run(way.engine(cheater(requests, policy), policy), requests).tau for policy in DRAFTING}
    assert min(tau["d2sd"], tau["ddtree"]) > tau["chain"] + 0.5
    assert tau["hybrid"] > tau["ddtree"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["chain", "reanchor", "d2sd"])
def test_perfect_drafts_fill_every_step(policy: str) -> None:
    requests = some_requests()
    way = WAYS["in flight"]
    stats = way.run(way.engine(cheater(requests, first_errors=0.0), policy), requests)
    assert stats.accepted.keys() == {BLOCK}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("policy", DRAFTING)
def test_wrong_drafts_still_gain_the_bonus(policy: str) -> None:
    requests = some_requests()
    way = WAYS["batch"]
    stats = way.run(way.engine(cheater(requests, policy, first_errors=1.0, second_errors=1.0), policy), requests)
    assert stats.accepted.keys() == {1}
    assert not stats.accepted_branches
