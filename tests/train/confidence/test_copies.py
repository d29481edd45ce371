"""The fitted odds of copies, on outcomes drawn from odds that are known."""

from __future__ import annotations

import math
import random

import pytest

from d2sd.plugins.lookup import LENGTHS, SUPPORT
from d2sd.runtime.observe import CopyOutcome
from d2sd.runtime.speculation.calibration import DEFAULT_ODDS, CopyOdds, copy_scores
from d2sd.train.confidence.fit import fit_copies

TRUE = CopyOdds([n / 3 - 2 for n in range(len(LENGTHS))], [n / 2 - 1 for n in range(len(SUPPORT) + 2)], [0.0, 0.5, 1.0])


def odds(of: CopyOdds, length: int, support: int, slot: int) -> float:
    return of.length[length] + of.support[support] + of.slot[slot]


def test_the_odds_that_outcomes_were_drawn_from() -> None:
    """Where there is enough to go by: entries are a sum, so it is the sums that are found."""
    dice, outcomes = random.Random(0), []
    for _ in range(40_000):
        at = dice.randrange(len(LENGTHS)), dice.randrange(len(SUPPORT) + 2), dice.randrange(3)
        outcomes.append(CopyOutcome(*at, dice.random() < 1 / (1 + math.exp(-odds(TRUE, *at)))))
    found = fit_copies(outcomes, 3)
    for length in range(len(LENGTHS)):
        for support in range(len(SUPPORT) + 2):
            at = length, support, length % 3
            assert odds(found, *at) == pytest.approx(odds(TRUE, *at), abs=0.25)


def test_without_outcomes_the_odds_are_the_default_s() -> None:
    found = fit_copies([], 9)
    assert (found.length, found.support) == ([*DEFAULT_ODDS.length], [*DEFAULT_ODDS.support])
    assert found.slot == [*DEFAULT_ODDS.slot, *[DEFAULT_ODDS.slot[-1]] * 2]
    found = fit_copies([CopyOutcome(2, 3, 1, False)] * 50, 3)
    assert found.length[2] < DEFAULT_ODDS.length[2]
    assert found.length[:2] == [*DEFAULT_ODDS.length[:2]]
    assert found.slot[0] == DEFAULT_ODDS.slot[0]


def test_scores_are_the_sigmoid_of_the_sum_by_temperature() -> None:
    table = copy_scores([TRUE, DEFAULT_ODDS], 4).table
    assert table.shape == (2, len(LENGTHS), len(SUPPORT) + 2, 4)
    assert table[0, 3, 2, 3].exp().item() == pytest.approx(1 / (1 + math.exp(-odds(TRUE, 3, 2, 2))))
    assert table[1, 0, 7, 1].exp().item() == pytest.approx(1 / (1 + math.exp(-odds(DEFAULT_ODDS, 0, 7, 1))))
