"""Where a text repeats itself, followed token by token on the host."""

from __future__ import annotations

import random

import numpy as np
import pytest

from d2sd.runtime.acceptance import Acceptance, Gain, Gains, RequestAcceptance
from d2sd.runtime.speculation.repeats import ENTRIES, Repeats
from tests.runtime.scalar_choice import SlowRepeats


def test_entries_of_lengths() -> None:
    assert [ENTRIES[n] for n in (1, 2, 3, 4, 5, 6, 8, 9, 15, 16)] == [0, 1, 2, 3, 3, 4, 4, 5, 5, 6]


def test_a_prompt_of_any_length_is_read_at_once() -> None:
    repeats = Repeats()
    repeats.follow(range(100_000))
    assert repeats.read == 100_000
    assert len(repeats.tokens) == 4096
    repeats.follow([*range(100_000), 99_000])
    assert repeats.length == 1


def test_what_copies_are_worth_is_learned_from_the_answer_alone() -> None:
    usual = Acceptance()
    known = usual.request()
    known.read([1, 2, 3, 4] * 5)
    before = usual.shown([known], 3).runs[0].tolist()
    assert usual.hits.chance == Acceptance().hits.chance
    assert before == sorted(before, reverse=True)
    assert before[0] == pytest.approx(usual.hits.chance[-1])
    text = [1, 2, 3, 4] * 5
    for token in (9, 1, 2, 9, 1, 2, 8, 1, 2, 7):  # what follows a match is never what followed it before
        text.append(token)
        known.read(text)
    known.repeats.length = 16
    assert usual.shown([known], 3).runs[0, 0] < before[0]
    assert usual.shown([known], 0).runs.shape == (1, 0)
    assert usual.hits.chance[1] < Acceptance().hits.chance[1], "all have learned of it"


def test_a_request_of_which_nothing_is_known_is_given_a_try() -> None:
    gain, usual = Gains.of([Gain(0.5, 3)]), Acceptance()
    known = usual.request()

    def tokens(*requests: RequestAcceptance) -> float:
        return float(gain.tokens(usual.shown(requests, 0))[0, 0])

    assert tokens(known) > tokens()
    for _ in range(50):
        usual.observe(gain, [0.5], [known])
    assert tokens(known) == pytest.approx(tokens(), abs=0.05)
    for _ in range(50):
        usual.observe(gain, [0.0], [known])
    assert tokens(known) < 1.1
    assert tokens(known) < tokens() < tokens(usual.request())


@pytest.mark.parametrize(("drafts", "depth"), [(0.3, 1), (1.0, 3), (2.5, 7)])
def test_the_odds_of_a_forecast_give_the_forecast(drafts: float, depth: int) -> None:
    gains = Gains.of([Gain(drafts, depth), Gain(1.5, 9)])
    factor = np.array([1.0, 1.0 + 1e-9, 3.0])
    found, chance = gains.accepted(factor)[0], gains.another(factor)[0, 2]
    assert found[:2] == pytest.approx([drafts, drafts], abs=1e-3)
    assert found[2] == pytest.approx(sum(chance**n for n in range(1, depth + 1)))


@pytest.mark.parametrize("seed", range(40))
def test_texts_are_followed_as_slowly_written(seed: int) -> None:
    """However many tokens are read at once."""
    dice, fast, slow, text = random.Random(seed), Repeats(), SlowRepeats(), list[int]()
    for _ in range(60):
        count = dice.choice((0, 1, 1, 1, 2, 5, 30))
        again = text[-dice.randrange(1, 30) :]
        text += again if dice.random() < 0.2 else [dice.randrange(1 + seed % 17) for _ in range(count)]
        assert fast.follow(text) == slow.follow(text)
        assert (fast.length, fast.place, fast.tokens, fast.read) == (slow.length, slow.place, slow.tokens, slow.read)
