"""The ways to draft that the papers compare: each proposes lines of tokens behind an anchor, of which a target takes
the longest right beginning.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from benchmarks.papers.book import Ask, Block, Book
from d2sd.policies import DrafterRole

#: A draft of a step: tokens behind the anchor.
Line = tuple[int, ...]


class Arm(Protocol):
    """A way to draft."""

    def lines(self, book: Book, place: int) -> list[Line]:
        """Tokens that it proposes behind the anchor at `place`."""
        ...


@dataclass(frozen=True)
class Chain:
    """DFlash: the first drafter's block, as far as the product of its probabilities is above `threshold`."""

    threshold: float = 0.0

    def lines(self, book: Book, place: int) -> list[Line]:
        (first,) = book.ask(Ask(place))
        reached = accumulate(first.confidence)
        return [first.tokens[: sum(math.exp(total) > self.threshold for total in reached)]]


@dataclass(frozen=True)
class Samples:
    """The first drafter's block, and `count` samples of the same pass."""

    count: int

    def lines(self, book: Book, place: int) -> list[Line]:
        return [block.tokens for block in _sampled(book, place, self.count)]


@dataclass(frozen=True)
class Restarts:
    """D²SD: blocks of `role` behind the first draft's `count` boundaries that `rule` picks, and the first draft."""

    count: int
    role: DrafterRole = DrafterRole.SECOND
    banned: bool = False  # a block may not begin with the token that it stands in for
    rule: str = "likeliest"
    samples: int = 0  # drafts of the first pass besides its best one, among whose boundaries the rule picks
    third: bool = False  # each restarted block is restarted once more, behind its own likeliest boundary
    calibrated: bool = False

    def lines(self, book: Book, place: int) -> list[Line]:
        drafts = _sampled(book, place, self.samples)
        picked = []
        for number, draft in enumerate(drafts):
            scores = boundary_scores(draft.calibrated if self.calibrated else draft.confidence)
            picked += [(score, -number, -i) for i, score in enumerate(RULES[self.rule](scores, draft, place))]
        found = list[Block](drafts)
        asks = []
        for _, number, i in sorted(picked, reverse=True)[: self.count]:
            asks.append(self._behind(place, drafts[-number], -i))
        second = book.ask(*asks)
        found += second
        if self.third:
            again = []
            for ask, block in zip(asks, second, strict=True):
                scores = boundary_scores(block.confidence)[len(ask.kept) + 1 :]
                if scores:
                    boundary = len(ask.kept) + 1 + scores.index(max(scores))
                    again.append(self._behind(place, block, boundary))
            found += book.ask(*again)
        return [block.tokens for block in found]

    def _behind(self, place: int, block: Block, boundary: int) -> Ask:
        rejected = block.tokens[boundary] if self.banned else -1
        return Ask(place, self.role, block.tokens[:boundary], rejected)


def _sampled(book: Book, place: int, count: int) -> list[Block]:
    return book.ask(Ask(place), *(Ask(place, seed=number) for number in range(1, count + 1)))


def boundary_scores(confidence: Sequence[float]) -> list[float]:
    """Probability that a block is accepted up to its i-th draft and no further, i from 0 (arXiv 2606.04446, Eq. 4), of
    log-probabilities.
    """
    before = [0.0, *accumulate(confidence)][: len(confidence)]
    return [math.exp(reached) * -math.expm1(own) for reached, own in zip(before, confidence, strict=True)]


#: How boundaries are picked: by the highest of these figures. Eq. 4's, and those it is compared with.
RULES: dict[str, Callable[[list[float], Block, int], list[float]]] = {
    "likeliest": lambda scores, block, place: scores,
    "first": lambda scores, block, place: [-float(i) for i in range(len(scores))],
    "least confident": lambda scores, block, place: [-own for own in block.confidence],
    "random": lambda scores, block, place: [random.Random(place * 1000 + i).random() for i in range(len(scores))],
}


def accepted(lines: Sequence[Line], text: Sequence[int]) -> int:
    """Tokens of the longest beginning that a line has in common with `text`."""
    return max(
        next((i for i, (token, right) in enumerate(zip(line, text, strict=False)) if token != right), len(line))
        for line in lines
    )


def nodes(lines: Sequence[Line]) -> int:
    """Rows of a step that verifies all lines as one tree, the anchor's among them: equal beginnings are one."""
    return 1 + len({line[: end + 1] for line in lines for end in range(len(line))})
