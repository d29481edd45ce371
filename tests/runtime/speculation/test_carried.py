"""Drafts that a step makes for the next one: the numbers survive the host, and only the right request gets them."""

from __future__ import annotations

import math

import pytest
import torch

from d2sd.plugins.trees import Draft
from d2sd.policies import PolicyName
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.speculation.host_drafts import carried_draft, pack_draft
from d2sd.runtime.speculation.policy import make_policy
from tests.runtime.helpers import BLOCK, honest, make_engine


def test_numbers_survive_to_the_bit() -> None:
    """Large ids, probabilities next to 0 and 1, no proposal; a request without a draft, and padding."""
    tokens = torch.tensor([[[1, 2], [3, 2**31 - 1]], [[5, 6], [7, 8]]])
    logprob = torch.tensor([[[-0.0, -1e-30], [-87.5, -math.inf]], [[-1.1, -2.2], [-3.3, -4.4]]])
    rows = pack_draft(Draft(tokens, logprob)).tolist()
    found = carried_draft([rows[1], None, rows[0]], 2, 2, 4)
    assert found.tokens.tolist() == [tokens[1].tolist(), [[0, 0], [0, 0]], tokens[0].tolist(), [[0, 0], [0, 0]]]
    for row, wanted in enumerate(
        [logprob[1], torch.full((2, 2), -math.inf), logprob[0], torch.full((2, 2), -math.inf)]
    ):
        assert torch.equal(found.logprob[row].view(torch.int32), wanted.view(torch.int32))


def test_a_draft_holds_where_it_was_made() -> None:
    """Not after a step of another policy; again after a preemption, when the same tokens are computed again."""
    sequence = Sequence(0, Request((1, 2, 3), 9), [1, 2, 3], cached=2)
    sequence.append([4, 5])
    sequence.carry([7])
    found = [sequence.next_draft]
    for cached in (0, 4):
        sequence.cached = cached
        found.append(sequence.next_draft)
    sequence.append([6])
    assert [*found, sequence.next_draft] == [[7], None, [7], None]
    sequence.carry(None)
    assert sequence.carried is None


def drafts(policy: str, temperature: float) -> dict[tuple[int, int], list[int]]:
    """By request and anchor's position: the tokens drafted there."""
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
            if (start := starts.get(sequence, 0)) and engine.trace.first.chain(row):
                found[sequence.id, start] = engine.trace.first.chain(row)
    return found


@pytest.mark.slow
def test_both_modes_draft_the_same() -> None:
    """Wherever both drafted, greedy and sampled: the block behind a node is the one of the step after it."""
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
