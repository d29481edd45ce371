"""Straightened confidences against a loop over scalars."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from d2sd.plugins.trees import Branches, Draft
from d2sd.policies import DraftUse
from d2sd.runtime.speculation.calibration import Calibration, Lines, logit
from tests.runtime.drafts import Passes, batch_of, passes
from tests.runtime.helpers import STEADY
from tests.runtime.oracle import calibrated

SLOTS = 4
TEMPERATURES = st.sampled_from([0.0, 0.3, 1.0, 1.7])


def made_up(seed: int) -> Calibration:
    dice = torch.Generator().manual_seed(seed)
    shape = 2, len(DraftUse), SLOTS, 2
    return Calibration(0.3 + 1.5 * torch.rand(shape, generator=dice), torch.randn(shape, generator=dice))


def expected(own: Calibration, use: int, temperature: float, distance: int, rank: int, logprob: float) -> float:
    warm, kind = min(temperature, 1.0), min(rank, 1)

    def between(values: Tensor) -> float:
        cold, hot = (float(values[t, use, distance, kind]) for t in (0, 1))
        return cold + warm * (hot - cold)

    return calibrated(logprob, between(own.slope), between(own.offset))


def close(got: list[float], wanted: list[float]) -> None:
    assert got == pytest.approx(wanted, abs=1e-5, rel=1e-5)


@STEADY
@given(passes(), st.integers(0, 10_000), st.sampled_from(DraftUse), st.lists(TEMPERATURES, min_size=3, max_size=3))
def test_equals_a_loop_over_scalars(made: Passes, seed: int, use: DraftUse, temperatures: list[float]) -> None:
    """Per request its temperature, per slot its distance, per rank its kind; -inf and certainty among the scores."""
    own, first, second = made_up(seed), made.first, made.second
    batch = made.batch
    batch.sampling.temperature.copy_(torch.tensor(temperatures[: len(made)]))
    one, two = own.apply(first, batch, use), own.apply(second, batch, use, made.branches)
    assert torch.equal(one.tokens, first.tokens)
    assert torch.equal(two.tokens, second.tokens)
    for row, temperature in zip(range(len(made)), temperatures, strict=False):
        for slot in range(first.tokens.shape[1]):
            wanted = [
                expected(own, use, temperature, slot, rank, logprob)
                for rank, logprob in enumerate(first.logprob[row, slot].tolist())
            ]
            close(one.logprob[row, slot].tolist(), wanted)
            for branch, length in enumerate(made.branches.prefix_len[row].tolist()):
                if slot >= length:
                    wanted = [
                        expected(own, use, temperature, slot - length, rank, logprob)
                        for rank, logprob in enumerate(second.logprob[row, branch, slot].tolist())
                    ]
                    close(two.logprob[row, branch, slot].tolist(), wanted)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_behind_each_parent_the_best_is_its_own(temperature: float) -> None:
    """Two branches of two slots with three candidates are compared row by row, whatever the best of the slot is."""
    own, dice = made_up(3), torch.Generator().manual_seed(0)
    logprob = torch.randn(1, 2, 2, 4, 3, generator=dice).log_softmax(-1)
    second = Draft(torch.arange(12).view(1, 2, 2, 3), logprob[..., 0, :], logprob)
    branches = Branches(torch.zeros(1, 2, 2, dtype=torch.long), torch.tensor([[0, 1]]), torch.full((1, 2), -1))
    found = own.apply(second, batch_of([0], [0], [0], temperature), DraftUse.SECOND, branches)
    assert found.behind is not None
    bests = set()
    for branch, slot, parent in itertools.product(range(2), range(2), range(4)):
        row = logprob[0, branch, slot, parent].tolist()
        distance = max(0, slot - branch)
        wanted = [expected(own, 1, temperature, distance, int(p < max(row)), p) for p in row]
        close(found.behind[0, branch, slot, parent].tolist(), wanted)
        bests.add(row.index(max(row)))
    assert bests == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("use", DraftUse)
def test_slope_one_and_offset_zero_change_nothing(use: DraftUse, temperature: float) -> None:
    neutral = Calibration(torch.ones(2, len(DraftUse), 5, 2), torch.zeros(2, len(DraftUse), 5, 2))
    said = torch.tensor([0.0, -1e-7, -1e-4, -0.01, -0.7, -3.0, -20.0, -80.0, -1000.0, -math.inf]).view(1, 5, 2)
    draft = Draft(torch.zeros(1, 5, 2, dtype=torch.long), said)
    straight = neutral.apply(draft, batch_of([0], [0], [0], temperature), use).logprob
    torch.testing.assert_close(straight, said, atol=1e-5, rtol=1e-5)


def test_a_use_without_lines_has_those_of_the_one_it_is_like() -> None:
    """And one that has them, the same for all candidates: its trees have no siblings."""
    table = [[[[1.0, 2.0]], [[3.0, 4.0]]], [[[5.0, 6.0]], [[7.0, 8.0]]]]
    own = Calibration.of(table, table, uses={"d2sd": Lines([[9.0], [10.0]], [[11.0], [12.0]])})
    for found, line in ((own.slope, [[[9.0] * 2], [[10.0] * 2]]), (own.offset, [[[11.0] * 2], [[12.0] * 2]])):
        assert found[:, DraftUse.D2SD].tolist() == line
        for use in (DraftUse.CHAIN, DraftUse.REANCHOR, DraftUse.FIRST):
            assert found[:, use].tolist() == [warm[0] for warm in table]
        assert found[:, DraftUse.SECOND].tolist() == [warm[1] for warm in table]


def test_log_odds_are_finite_but_for_what_cannot_be() -> None:
    odds = logit(torch.tensor([0.0, -1e-9, -1e-6, -0.6931472, -100.0, -math.inf]))
    assert odds[:3].tolist() == pytest.approx([13.8155] * 3, abs=0.1)
    assert odds[3:].tolist() == pytest.approx([0.0, -100.0, -math.inf], abs=1e-5)
