"""Drafts that a step makes for the next one: only the anchor that they were made for gets them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from d2sd.modeling.decoder import DecoderOutput
from d2sd.plugins.trees import Accepted, Draft
from d2sd.policies import PolicyName
from d2sd.runtime.batch import Batch
from d2sd.runtime.model_runner import Verified
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.flex_parallel import ParallelMode
from d2sd.runtime.speculation.policy import make_policy
from tests.runtime.helpers import BLOCK, honest, make_engine, models
from tests.runtime.test_model_runner import TABLE, TEXTS, prefilled


def leave(mode: ParallelMode, batch: Batch) -> Batch:
    """A step that commits 1, 3 and 2 tokens of three requests, and the batch of the step after it."""
    count, tokens = torch.tensor([1, 3, 2]), torch.arange(3 * BLOCK).view(3, BLOCK) + 20
    behind = torch.randn(3, BLOCK, BLOCK, models()[0].config.body.hidden_size)
    here = behind[..., 0, :]
    rows = DecoderOutput(here, here, here, here, joined=behind)
    verified = Verified(tokens, behind[..., 0, :], rows)
    path = torch.arange(BLOCK).expand(3, -1)
    mode.keep(batch, verified, Accepted(path, count, tokens, torch.zeros_like(count)))
    return replace(batch, anchor=tokens.gather(1, count[:, None] - 1)[:, 0], where=batch.where.after(count))


def proposed(draft: Draft) -> list[bool]:
    """Whether each request has a proposal in its first slot."""
    return (draft.logprob[:, 0, 0] > -math.inf).tolist()


def test_a_draft_is_for_one_anchor() -> None:
    """For no other token, position or page; and a request that has ended leaves none."""
    runner, before = prefilled(TEXTS, TABLE, case="flex")
    mode = runner.parallel
    assert mode is not None
    after = leave(mode, before)
    draft = mode.take(after)
    assert proposed(mode.take(before)) == [False, False, False]
    assert proposed(draft) == [True, True, True]
    other = replace(after, anchor=after.anchor + torch.tensor([0, 1, 0]))
    moved = replace(after, where=after.where.after(torch.tensor([0, 0, -1])))
    elsewhere = replace(after, where=after.where.map_tables(lambda table: table.roll(1, 0)))
    for changed, kept in ((other, [0, 2]), (moved, [0, 1]), (elsewhere, [])):
        found = mode.take(changed)
        assert proposed(found) == [row in kept for row in range(3)]
        assert torch.equal(found.tokens[kept], draft.tokens[kept])
        assert torch.equal(found.logprob[kept], draft.logprob[kept])
    mode.tensors[-1].fill_(-1)
    leave(mode, replace(before, active=torch.tensor([True, False, True])))
    assert proposed(mode.take(after)) == [True, False, True]


def drafts(policy: str, temperature: float) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    """By request and anchor's position: the tokens drafted there, and their log-probabilities."""
    engine = make_engine(honest(case=policy), policy)
    engine.record_trace = True
    found = {}
    for seed in range(3):
        engine.submit(Request((1 + seed, 7, 9), 24, SamplingParams(temperature, seed=seed)))
    while engine.busy:
        before = [(sequence, sequence.cached) for sequence in engine.scheduler.running]
        engine.step()
        assert engine.trace is not None
        assert engine.trace.first is not None
        starts = dict(before)
        for row, sequence in enumerate(engine.trace.sequences):
            first = engine.trace.first
            if (start := starts.get(sequence, 0)) and first.chain(row):
                found[sequence.id, start] = first.chain(row), first.logprob[row, :, 0].tolist()
    return found


@pytest.mark.slow
def test_both_modes_draft_the_same() -> None:
    """Wherever both drafted, greedy and sampled, to the bit: the block behind a node is that of the step after it."""
    for temperature in (0.0, 1.0):
        one, other = drafts("flex", temperature), drafts("flex_parallel", temperature)
        both = one.keys() & other.keys()
        assert len(both) > 30
        assert {place: one[place] for place in both} == {place: other[place] for place in both}


def test_switching_modes_costs_a_draft_and_no_text() -> None:
    """The engine switches as `auto` does: parallel, sequential and plain steps in turns."""
    request = Request((3, 1, 4), 30)
    expected = make_engine(honest(), "off").generate([request])[0].answer
    engine = make_engine(honest(case="flex"), "flex")
    names: tuple[PolicyName, ...] = ("flex_parallel", "flex_parallel", "off", "flex_parallel", "chain")
    policies = [make_policy(name, block_size=BLOCK, branches=1, row_budget=BLOCK) for name in names]
    sequence = engine.submit(request)
    for step in range(60):
        engine.policy = policies[step % len(policies)]
        engine.step()
    assert sequence.answer == expected
