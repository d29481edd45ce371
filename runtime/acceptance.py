"""Accepted drafts, observed over forecast, of all requests and of each: texts differ, and answers change.

A step's forecast has two parts: drafts, what a tree without copies of earlier text gains, and copies, what they add. A
request whose text repeats itself multiplies the second and leaves the first where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

#: EMA windows: in request-steps for all requests, a few answers; in steps for one of them, whose answer is short.
WINDOW, REQUEST_WINDOW = 32, 15
#: Steps of plain decoding until what was learned decays back, so that speculation is retried.
DECAY_STEPS = 2048


class Gain(NamedTuple):
    """Tokens a step over one, of a tree."""

    drafts: float
    copies: float  # more, because copies compete


class Outcome(NamedTuple):
    """One request in one step."""

    accepted: float  # drafts, without the bonus
    copied: bool = False  # the last of them by a copy


@dataclass(slots=True)
class Acceptance:
    """Factors on both parts of a `Gain`."""

    drafts: float = 1.0
    copies: float = 1.0

    def tau(self, gain: Gain, rows: int) -> float:
        """Tokens a step of a tree of `rows` nodes with this forecast."""
        return min(1 + self.drafts * gain.drafts + self.copies * gain.copies, rows)

    def observe(self, gain: Gain, outcomes: Sequence[Outcome], window: int) -> None:
        """Learn from a step with this forecast: an EMA over `window` outcomes.

        Where a copy won, what drafts were expected to gain is theirs and the rest is the copy's.
        """
        drafted = [one.accepted for one in outcomes if not (one.copied and gain.copies > 0)]
        if gain.copies > 0:  # a small forecast says little about its factor
            expected = self.drafts * gain.drafts
            more = fmean(one.accepted - expected if one.copied else 0.0 for one in outcomes) / gain.copies
            rate = min(1.0, gain.copies) * len(outcomes) / (window + len(outcomes))
            self.copies = max(0.0, self.copies + rate * (more - self.copies))
        if drafted and gain.drafts > 0:
            self.drafts += (fmean(drafted) / gain.drafts - self.drafts) * len(drafted) / (window + len(drafted))

    def decay(self) -> None:
        """Forget a little, in a step that drafted nothing."""
        self.drafts += (1 - self.drafts) / DECAY_STEPS
        self.copies += (1 - self.copies) / DECAY_STEPS
