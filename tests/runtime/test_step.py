"""A step hands its results from verb to verb: who is asked to draft, how it is straightened, what is left out."""

from __future__ import annotations

import pytest
import torch

from d2sd.plugins.choice import WIDTH
from d2sd.plugins.trees import Draft
from d2sd.policies import DraftUse
from d2sd.runtime.batch import Batch
from d2sd.runtime.decode import StepResult, decode_step
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.calibration import Calibration, logit
from tests.runtime.cheating import changing
from tests.runtime.helpers import BLOCK, BRANCHES, honest, make_engine, placed
from tests.tiny import CASES, prepared

SLOTS = BLOCK - 1


class Spy(ModelRunner):
    """Notes what it is asked for and what it says."""

    def __init__(self, case: str = "") -> None:
        super().__init__(*prepared(*placed(case)))
        self.asked: list[tuple[str, int, int]] = []
        self.said: list[Draft] = []
        changing(self.drafts, "first", lambda draft, batch, width: self._noted(draft, "first", 0, width))
        changing(self.drafts, "second", lambda draft, *given: self._noted(draft, "second", *given[2:]))

    def _noted(self, draft: Draft, which: str, role: int, width: int) -> Draft:
        self.asked.append((which, role, width))
        self.said.append(draft)
        return draft


def one_step(engine: Engine) -> tuple[Batch, StepResult]:
    """A step over five requests, five ways to sample, padded to six."""
    for row in range(5):
        engine.submit(Request((row + 1, 7, row + 1, 7), 20, SamplingParams(0.5 * row, seed=row)))
    prepared = engine.prepare(engine.admit())
    batch = prepared.batch
    engine.runner.context.inject(engine.policy.drafters)
    return batch, decode_step(engine.runner, engine.policy, batch, engine.calibration)


ASKED: dict[str, list[tuple[str, int, int]]] = {
    "off": [],
    "lookup": [],
    "chain": [("first", 0, 1)],
    "reanchor": [("first", 0, 1), ("second", 0, 1)],
    "d2sd": [("first", 0, 1), ("second", 1, 1)],
    "ddtree": [("first", 0, WIDTH)],
    "hybrid": [("first", 0, WIDTH), ("second", 1, WIDTH)],
    "flex": [("first", 0, 1)],
    "flex_tree": [("first", 0, WIDTH)],
    "flex_parallel": [],  # the step before has drafted
}


@pytest.mark.parametrize("policy", CASES)
def test_who_is_asked_for_what(policy: str) -> None:
    runner = Spy(policy)
    engine = make_engine(runner, policy, max_batch=5)
    _, result = one_step(engine)
    first, branches, second, *_ = result.drafted
    assert runner.asked == ASKED[policy]
    assert (first is None) == (policy == "off")
    assert (branches is None) == (second is None) == (policy not in ("reanchor", "d2sd", "hybrid"))
    if first is not None:
        assert first.tokens.shape == first.logprob.shape == (6, SLOTS, engine.policy.topk)
    if branches is not None and second is not None:
        assert branches.prefix_len.shape == branches.rejected.shape == (6, BRANCHES)
        assert second.tokens.shape == second.logprob.shape == (6, BRANCHES, SLOTS, engine.policy.topk)
    assert result.drafted.tree.tokens.shape == (6, engine.policy.num_nodes)


@pytest.mark.parametrize("policy", CASES)
def test_clock_and_trace_know_what_was_done(policy: str) -> None:
    engine = make_engine(honest(case=policy), policy)
    engine.record_trace = True
    engine.generate([Request((1, 2), 3)])
    stages = {"prefill", "build_tree", "verify", "accept", "commit", "retire"}
    if policy != "off":
        stages.add("lookup" if policy == "lookup" else "draft_first")
    if policy in ("reanchor", "d2sd", "hybrid"):
        stages |= {"pick_boundaries", "draft_second"}
    assert engine.clock.seconds.keys() == stages
    trace = engine.trace
    assert trace is not None
    assert trace.policy is engine.policy
    assert (trace.first is None) == (policy == "off")
    assert (trace.branches is not None) == ("draft_second" in stages)


@pytest.mark.parametrize(("policy", "row"), [("ddtree", 0), ("flex_tree", 0), ("flex", 2)])
def test_each_first_draft_has_its_own_calibration(policy: str, row: int) -> None:
    made = []
    for offset in (0.0, 1.0):
        table = torch.zeros(2, len(DraftUse), SLOTS, 2)
        table[:, row] = offset
        engine = make_engine(honest(case=policy), policy, max_batch=5)
        engine.calibration = Calibration(torch.ones_like(table), table)
        _, result = one_step(engine)
        assert result.drafted.first is not None
        made.append(result.drafted.first)
    moved = logit(made[1].logprob[0]) - logit(made[0].logprob[0])
    torch.testing.assert_close(moved, torch.ones_like(moved), atol=1e-3, rtol=0)


def test_lookup_drafts_from_each_text_alone() -> None:
    """Five requests of different lengths, three without a match, and padding, which drafts nothing."""
    engine = make_engine(honest(), "lookup", max_batch=5)
    prompts = (1, 2, 3, 4, 5, 6, 1, 2), (7, 8, 7), (9, 10, 11), (12,), (13, 14)
    for prompt in prompts:
        engine.submit(Request(prompt, 5))
    prepared = engine.prepare(engine.admit())
    result = decode_step(engine.runner, engine.policy, prepared.batch)
    assert result.drafted.first is not None
    assert result.drafted.first.top1.tolist() == [[3, 4, 5, 6], [8, 7, 8, 7], *[[0] * 4] * 4]
    alone = [[anchor, 0, 0, 0, 0] for anchor in (11, 12, 14, 0)]
    assert result.drafted.tree.tokens.tolist() == [[2, 3, 4, 5, 6], [7, 8, 7, 8, 7], *alone]
    assert result.drafted.tree.valid.sum(1).tolist() == [5, 5, 1, 1, 1, 1]


def made_up(seed: int = 0) -> Calibration:
    dice = torch.Generator().manual_seed(seed)
    shape = 2, len(DraftUse), SLOTS, 2
    return Calibration(0.5 + torch.rand(shape, generator=dice), torch.randn(shape, generator=dice))


@pytest.mark.parametrize("policy", ["chain", "reanchor", "d2sd", "ddtree", "hybrid"])
def test_drafts_are_straightened_as_those_of_their_use(policy: str) -> None:
    """Drafts of both passes are calibrated before they decide anything; in reanchor the first drafter runs twice."""
    runner, calibration = Spy(), made_up()
    engine = make_engine(runner, policy, calibration=calibration)
    batch, result = one_step(engine)
    first, branches, second, *_ = result.drafted
    assert first is not None
    one, two = {
        "ddtree": (DraftUse.FIRST, None),
        "hybrid": (DraftUse.FIRST, DraftUse.SECOND),
        "chain": (DraftUse.CHAIN, None),
        "reanchor": (DraftUse.CHAIN, DraftUse.REANCHOR),
        "d2sd": (DraftUse.CHAIN, DraftUse.D2SD),
    }[policy]
    straight = calibration.apply(runner.said[0], batch, one)
    assert torch.equal(first.logprob, straight.logprob)
    assert not torch.allclose(first.logprob, runner.said[0].logprob)
    if branches is not None and second is not None:
        wanted = engine.policy.branches(batch, straight)
        assert torch.equal(branches.prefix_len, wanted.prefix_len)
        assert two is not None
        assert torch.equal(second.logprob, calibration.apply(runner.said[1], batch, two, branches).logprob)
