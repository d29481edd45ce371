"""Forecasts of what a step accepts, by who proposes it, corrected by what every request has shown.

Drafts are forecast by the bundle's calibration and corrected by what is observed. Copies of earlier text are forecast
for each step by how far the text's end matches an earlier place, and how often the token behind such a match was right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from d2sd.plugins.lookup.types import LONGEST
from d2sd.runtime.speculation.repeats import ENTRIES, Repeats

# Shape letters: P trees, R requests, L tokens of a copy.

Array = npt.NDArray[np.float64]
#: EMA window of all requests, in request-steps: a few answers.
WINDOW = 32
#: The same for one request, whose answer is short; its first steps count for more.
_REQUEST_WINDOW, _FIRST_WINDOW = 15, 3
#: What is added to the factor of a request that has shown none: to try costs a few steps, not to try all of them.
_CURIOSITY = 0.4
#: Least factor on the odds of drafts: from nothing there is no way back.
_LEAST = 0.02
#: Steps of plain decoding until what was learned decays back, so that speculation is retried.
_DECAY_STEPS = 2048
#: Chances that the token behind a match is right, by the entries of LENGTHS, before any was seen: 3,015 tokens of 72
#: answers of SmolLM2.
_CHANCES = (0.2, 0.48, 0.56, 0.75, 0.8, 0.88, 0.93)
#: Tokens that these are worth, and most that are remembered.
_CHANCE_WEIGHT, _MOST_WEIGHT = 16.0, 256.0
#: Copied tokens, right or expected to be, that a request begins with; the share that is forgotten by each new one.
_BEGINNING, _FORGOTTEN = 3.0, 1 / 64
_ENTRIES = np.array(ENTRIES)


class Gain(NamedTuple):
    """The forecast of a tree."""

    drafts: float  # tokens a step over one, without copies
    depth: int  # most of them
    copies: int = 0  # most tokens of a copy
    share: float = 1.0  # of what copies bring that fits into the tree


class Gains(NamedTuple):
    """The forecasts of P trees; columns [P, 1], with the fields of `Gain`."""

    drafts: Array
    depth: Array
    copies: Array
    share: Array
    odds: Array  # of each draft

    @staticmethod
    def of(gains: Sequence[Gain]) -> Gains:
        rows = [(*gain, _odds(round(gain.drafts, 3), gain.depth)) for gain in gains]
        return Gains(*np.array(rows, np.float64).T[..., None])

    def of_one(self, tree: int) -> Gains:
        """The forecast of one of the trees; columns [1, 1]."""
        return Gains(*(column[tree : tree + 1] for column in self))

    def another(self, factor: Array) -> Array:
        """Chances [P, R] that a draft behind accepted ones is accepted, with `factor` [R] times its odds.

        Lengths are taken to be geometric up to `depth`. So a text whose drafts are accepted more often than forecast
        gains more from deep trees than from shallow ones.
        """
        odds = self.odds * factor
        return odds / (1 + odds)

    def accepted(self, factor: Array) -> Array:
        """Drafts [P, R] that are accepted in the mean, with `factor` [R] times the odds of each."""
        drafts = self.odds * factor * (1 - self.another(factor) ** self.depth)
        return np.where(factor == 1.0, self.drafts, drafts)

    def tokens(self, shown: Shown) -> Array:
        """Tokens [P, R] a step.

        Drafts and a copy are accepted to lengths that are taken to be independent, those of drafts geometric: the
        longer one counts.
        """
        tokens = 1 + self.accepted(shown.factor)
        if not shown.runs.any():
            return tokens
        runs, another = shown.runs.T, self.another(shown.factor)
        fits = (np.arange(len(runs)) < self.copies).astype(float)  # [P, L]
        drafted = np.zeros_like(another)  # the sum of the chances that so many drafts are right too
        for ahead in reversed(range(len(runs))):
            drafted += fits[:, ahead, None] * runs[ahead]
            drafted *= another
        tokens += self.share * (fits @ runs - drafted)
        return tokens


class Shown(NamedTuple):
    """Corrections that requests have shown, an entry each."""

    factor: Array  # [R] on the odds of drafts
    runs: Array  # [R, L], chances that the next 1, 2, … tokens are those behind a match; 0 without one


@cache
def _odds(drafts: float, depth: int) -> float:
    """The odds of each draft whose geometric lengths up to `depth` have the mean `drafts`: by bisection."""
    low, high = 0.0, 1.0 - 1e-6
    for _ in range(40):
        chance = (low + high) / 2
        low, high = (chance, high) if chance * (1 - chance**depth) / (1 - chance) < drafts else (low, chance)
    return low / (1 - low)


@dataclass(slots=True)
class Hits:
    """Chances that the token behind a match is right, of all requests."""

    chance: list[float] = field(default_factory=lambda: [*_CHANCES])
    weight: list[float] = field(default_factory=lambda: [_CHANCE_WEIGHT] * len(_CHANCES))

    def observe(self, entry: int, *, right: bool) -> None:
        """Learn from one token behind a match of this entry of LENGTHS."""
        self.weight[entry] = min(self.weight[entry] + 1, _MOST_WEIGHT)
        self.chance[entry] += (right - self.chance[entry]) / self.weight[entry]


@dataclass(slots=True)
class Acceptance:
    """Forecasts' corrections that all requests have taught."""

    drafts: float = 1.0  # odds of a draft, observed over forecast
    hits: Hits = field(default_factory=Hits)

    def request(self, *, speculates: bool = True) -> RequestAcceptance:
        """The beginning of a request, where this is what all have shown."""
        return RequestAcceptance(self, speculates)

    def shown(self, requests: Sequence[RequestAcceptance], most: int) -> Shown:
        """Gather what each has shown, with runs of up to `most` tokens; without requests, of one that is unknown."""
        if not requests:
            return Shown(np.array([self.drafts]), np.zeros((1, most)))
        factor = np.array([known.drafts for known in requests])
        factor += _CURIOSITY / np.sqrt([1 + known.steps for known in requests])
        factor *= [known.speculates for known in requests]
        length = np.array([known.repeats.length for known in requests])[:, None]
        odds = np.array([known.right / known.expected for known in requests])[:, None]
        ahead = np.minimum(length + np.arange(most), LONGEST)  # each right token lengthens the match
        right = odds * (chance := np.array(self.hits.chance)[_ENTRIES[ahead]])
        return Shown(factor, np.cumprod(right / (1 - chance + right), 1) * (length > 0))

    def observe(self, gain: Gains, accepted: Sequence[float], requests: Sequence[RequestAcceptance] = ()) -> None:
        """Learn from drafts of one tree that requests accepted in a step which no copy has won for them.

        `requests`, if any are given, learn it too, each from its own.
        """
        if not accepted or not gain.drafts > 0:
            return
        learning: list[Acceptance | RequestAcceptance] = [self, *requests]
        rates = [len(accepted) / (WINDOW + len(accepted))]
        rates += [1 / (1 + min(_REQUEST_WINDOW, _FIRST_WINDOW + known.steps)) for known in requests]
        seen = np.array([fmean(accepted), *accepted][: len(learning)])
        factor = np.array([one.drafts for one in learning])
        # By a share of what was observed over what the factor had led to expect.
        learned = factor * (1 + np.array(rates) * (seen / gain.accepted(factor)[0] - 1))
        for one, drafts in zip(learning, np.maximum(learned, _LEAST).tolist(), strict=True):
            one.drafts = drafts
        for known in requests:
            known.steps += 1

    def decay(self, requests: Sequence[RequestAcceptance]) -> None:
        """Forget a little, all and each request, in a step that drafted nothing."""
        every: list[Acceptance | RequestAcceptance] = [self, *requests]
        for one in every:
            one.drafts += (1 - one.drafts) / _DECAY_STEPS


@dataclass(slots=True)
class RequestAcceptance:
    """Forecasts' corrections that one request has taught."""

    all: Acceptance
    speculates: bool = True  # else its steps verify one row
    drafts: float = field(init=False)
    repeats: Repeats = field(default_factory=Repeats)
    right: float = _BEGINNING  # copied tokens
    expected: float = _BEGINNING  # the same, by the chances of all requests
    steps: int = 0  # that drafted

    def __post_init__(self) -> None:
        self.drafts = self.all.drafts

    def worth(self, price: float, most: int) -> float:
        """Tokens that a copy of up to `most` is expected to bring, each less the `price` in tokens of its row."""
        odds, reached, found = self.right / self.expected, 1.0, 0.0
        for ahead in range(most if self.repeats.length else 0):
            chance = self.all.hits.chance[ENTRIES[min(self.repeats.length + ahead, LONGEST)]]
            reached *= odds * chance / (1 - chance + odds * chance)
            if reached <= price:
                break
            found += reached - price
        return found

    def read(self, text: Sequence[int]) -> None:
        """Follow the text, and learn from what is new in it; the first time is the prompt, which says nothing of it."""
        begun = self.repeats.read > 0
        for entry, right in self.repeats.follow(text):
            if begun:
                self.right += right - self.right * _FORGOTTEN
                self.expected += self.all.hits.chance[entry] - self.expected * _FORGOTTEN
                self.all.hits.observe(entry, right=right)
