"""Where a text repeats itself, followed token by token on the host."""

from __future__ import annotations

import random

import pytest

from d2sd.plugins.lookup.types import LONGEST
from d2sd.runtime.acceptance import Acceptance, Gain
from d2sd.runtime.speculation.repeats import Repeats, entry_of


def test_entries_of_lengths() -> None:
    assert [entry_of(n) for n in (1, 2, 3, 4, 5, 6, 8, 9, 15, 16, 40)] == [0, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6]


def test_a_match_by_hand() -> None:
    repeats = Repeats()
    assert repeats.follow([5, 6, 7, 8]) == []
    assert repeats.length == 0
    assert repeats.follow([5, 6, 7, 8, 6]) == []
    assert (repeats.length, repeats.place) == (1, 2)
    assert repeats.follow([5, 6, 7, 8, 6, 7]) == [(0, True)]
    assert (repeats.length, repeats.place) == (2, 3)
    assert repeats.follow([5, 6, 7, 8, 6, 7, 9, 9]) == [(1, False)]
    assert (repeats.length, repeats.place) == (1, 7), "the nine before the last"
    assert repeats.follow([5, 6, 7, 8, 6, 7, 9, 9, 9]) == [(0, True)]


@pytest.mark.parametrize("seed", range(5))
def test_a_match_is_one_and_is_the_longest_of_its_beginning(seed: int) -> None:
    """Whatever the text: as many tokens as it says are equal, no match can be lengthened, and none is missed."""
    dice, repeats, text = random.Random(seed), Repeats(), list[int]()
    for _ in range(300):
        text.append(dice.randrange(1 + seed * 2))
        repeats.follow(text)
        assert repeats.tokens == text
        if repeats.length:
            start = repeats.place
            assert start < len(text)
            assert text[start - repeats.length : start] == text[-repeats.length :]
        else:
            assert text[-1] not in text[:-1]
    assert repeats.length <= LONGEST


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
    before = known.run(3)
    assert usual.hits.chance == Acceptance().hits.chance
    assert before == sorted(before, reverse=True)
    assert before[0] == pytest.approx(usual.hits.chance[-1])
    text = [1, 2, 3, 4] * 5
    for token in (9, 1, 2, 9, 1, 2, 8, 1, 2, 7):  # what follows a match is never what followed it before
        text.append(token)
        known.read(text)
    known.repeats.length = 16
    assert known.run(3)[0] < before[0]
    assert known.run(0) == []
    assert usual.hits.chance[1] < Acceptance().hits.chance[1], "all have learned of it"


def test_a_request_of_which_nothing_is_known_is_given_a_try() -> None:
    gain, usual = Gain(0.5, 3), Acceptance()
    known = usual.request()
    assert known.tau(gain) > usual.tau(gain)
    for _ in range(50):
        known.observe(gain, 0.5)
    assert known.tau(gain) == pytest.approx(usual.tau(gain), abs=0.05)
    for _ in range(50):
        known.observe(gain, 0.0)
    assert known.tau(gain) < 1.1


@pytest.mark.parametrize(("drafts", "depth"), [(0.3, 1), (1.0, 3), (2.5, 7)])
def test_the_odds_of_a_forecast_give_the_forecast(drafts: float, depth: int) -> None:
    assert Gain(drafts, depth).accepted(1.0) == pytest.approx(drafts, abs=1e-3)
    chance = Gain(drafts, depth).another(3.0)
    assert Gain(drafts, depth).accepted(3.0) == pytest.approx(sum(chance**n for n in range(1, depth + 1)))
