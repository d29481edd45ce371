"""Forecasts of what a step accepts, by who proposes it, corrected by what every request has shown.

Drafts are forecast by the bundle's calibration and corrected by what is observed. Copies of earlier text are forecast
for each step by how far the text's end matches an earlier place, and how often the token behind such a match was right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import sqrt
from statistics import fmean
from typing import NamedTuple

from d2sd.runtime.speculation.repeats import Repeats, entry_of

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


class Gain(NamedTuple):
    """The forecast of a tree."""

    drafts: float  # tokens a step over one, without copies
    depth: int  # most of them
    copies: int = 0  # most tokens of a copy
    share: float = 1.0  # of what copies bring that fits into the tree

    def another(self, factor: float) -> float:
        """Chance that a draft behind accepted ones is accepted, with `factor` times its odds.

        Lengths are taken to be geometric up to `depth`. So a text whose drafts are accepted more often than forecast
        gains more from deep trees than from shallow ones.
        """
        odds = factor * _odds(round(self.drafts, 3), self.depth)
        return odds / (1 + odds)

    def accepted(self, factor: float) -> float:
        """Drafts that are accepted in the mean, with `factor` times the odds of each."""
        if factor == 1.0:
            return self.drafts
        chance = self.another(factor)
        return chance * (1 - chance**self.depth) / (1 - chance)


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

    def request(self) -> RequestAcceptance:
        """The beginning of a request, where this is what all have shown."""
        return RequestAcceptance(self)

    def tau(self, gain: Gain) -> float:
        """Tokens a step of a tree with this forecast, for a request of which nothing is known."""
        return 1 + gain.accepted(self.drafts)

    def observe(self, gain: Gain, accepted: Sequence[float]) -> None:
        """Learn from drafts that requests accepted in a step which no copy has won for them."""
        if accepted and gain.drafts > 0:
            rate = len(accepted) / (WINDOW + len(accepted))
            self.drafts = _learned(self.drafts, gain, fmean(accepted), rate)

    def decay(self) -> None:
        """Forget a little, in a step that drafted nothing."""
        self.drafts += (1 - self.drafts) / _DECAY_STEPS


def _learned(factor: float, gain: Gain, accepted: float, rate: float) -> float:
    """The factor after a step, changed by a share of what was observed over what it had led to expect."""
    return max(_LEAST, factor * (1 + rate * (accepted / gain.accepted(factor) - 1)))


@dataclass(slots=True)
class RequestAcceptance:
    """The same of one request."""

    all: Acceptance
    drafts: float = field(init=False)
    repeats: Repeats = field(default_factory=Repeats)
    right: float = _BEGINNING  # copied tokens
    expected: float = _BEGINNING  # the same, by the chances of all requests
    steps: int = 0  # that drafted
    _run: list[float] = field(init=False, default_factory=list)  # `run` of the text that was read last

    def __post_init__(self) -> None:
        self.drafts = self.all.drafts

    def tau(self, gain: Gain) -> float:
        """Tokens a step of a tree with this forecast.

        Drafts and a copy are accepted to lengths that are taken to be independent, those of drafts geometric: the
        longer one counts.
        """
        factor = self.drafts + _CURIOSITY / sqrt(1 + self.steps)
        another = gain.another(factor)
        run = self.run(gain.copies)
        more = sum(chance * (1 - another**length) for length, chance in enumerate(run, 1))
        return 1 + gain.accepted(factor) + gain.share * more

    def run(self, most: int) -> list[float]:
        """Chances that the next 1, 2, … `most` tokens are those behind the match; each right one lengthens it."""
        odds, chances = self.right / self.expected, self._run
        reached = chances[-1] if chances else 1.0
        for ahead in range(len(chances), most if self.repeats.length else 0):
            chance = self.all.hits.chance[entry_of(self.repeats.length + ahead)]
            reached *= odds * chance / (1 - chance + odds * chance)
            chances.append(reached)
        return chances[:most]

    def observe(self, gain: Gain, accepted: float) -> None:
        """Learn from drafts that were accepted in a step which no copy has won."""
        if gain.drafts > 0:
            window = min(_REQUEST_WINDOW, _FIRST_WINDOW + self.steps)
            self.drafts = _learned(self.drafts, gain, accepted, 1 / (1 + window))
            self.steps += 1

    def read(self, text: Sequence[int]) -> None:
        """Follow the text, and learn from what is new in it; the first time is the prompt, which says nothing of it."""
        begun = self.repeats.read > 0
        self._run = []
        for entry, right in self.repeats.follow(text):
            if begun:
                self.right += right - self.right * _FORGOTTEN
                self.expected += self.all.hits.chance[entry] - self.expected * _FORGOTTEN
                self.all.hits.observe(entry, right=right)

    def decay(self) -> None:
        """Forget a little, in a step that drafted nothing."""
        self.drafts += (1 - self.drafts) / _DECAY_STEPS
