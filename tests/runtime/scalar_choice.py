"""The choice of `auto` request by request and token by token, as its formulas are written: an oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean

from d2sd.plugins.lookup.types import LONGEST
from d2sd.policies import FirstPass
from d2sd.runtime.acceptance import _CURIOSITY, Gain, RequestAcceptance, _odds
from d2sd.runtime.policy_selector import Asked, PolicySelector, forecast_gain
from d2sd.runtime.served_times import StepKind
from d2sd.runtime.speculation.policy import Policy
from d2sd.runtime.speculation.repeats import ENTRIES
from d2sd.runtime.step_times import RowTimes

#: Tokens of a request a second, seconds of the step, nodes of each request's tree, tokens of a request.
Plan = tuple[float, float, tuple[int, ...] | None, float]


def another(gain: Gain, factor: float) -> float:
    odds = factor * _odds(round(gain.drafts, 3), gain.depth)
    return odds / (1 + odds)


def accepted(gain: Gain, factor: float) -> float:
    return gain.drafts if factor == 1.0 else sum(another(gain, factor) ** n for n in range(1, gain.depth + 1))


def run(known: RequestAcceptance, most: int) -> list[float]:
    odds, chances, reached = known.right / known.expected, list[float](), 1.0
    for ahead in range(most if known.repeats.length else 0):
        chance = known.all.hits.chance[ENTRIES[min(known.repeats.length + ahead, LONGEST)]]
        reached *= odds * chance / (1 - chance + odds * chance)
        chances.append(reached)
    return chances


def tokens_of(known: RequestAcceptance, gain: Gain) -> float:
    factor = known.drafts + _CURIOSITY / sqrt(1 + known.steps)
    chance = another(gain, factor)
    more = sum(one * (1 - chance**length) for length, one in enumerate(run(known, gain.copies), 1))
    return 1 + accepted(gain, factor) + gain.share * more


def before_the_end(tokens: float, remaining: float) -> float:
    return tokens * (1 - (1 - 1 / tokens) ** max(1.0, remaining)) if tokens > 1 else 1.0


def seconds_of(times: RowTimes, rows: int) -> float:
    """On the line between the two points around it, or the last two."""
    pairs = list(zip(times.points, times.points[1:], strict=False))
    (fewer, least), (more, most) = next((pair for pair in pairs if rows < pair[1][0]), pairs[-1])
    return least + (most - least) * (rows - fewer) / (more - fewer)


def between_ends(own: PolicySelector, seconds: float) -> float:
    served = own.served
    return max(served.plain * seconds, served.host) if served._ahead else served.plain * seconds + served.host


def plan(own: PolicySelector, policy: Policy, asked: Asked) -> Plan | None:
    """The best step of a policy; None if its steps were not measured, or if it has nothing to copy."""
    seconds, context = own.times.step(policy, asked.bucket, asked.context), 0.0
    if seconds is None:
        return None
    pending = own.times.pending
    catch_up = sum(asked.pending.get(role, 0) * pending.get(role, 0.0) for role in policy.drafters)
    gain, count = forecast_gain(own.forecast, policy, asked.temperature, own.slots), len(asked.requests)
    if own.verify is None or policy.first_pass is not FirstPass.PROMPT_LOOKUP or not asked.requests:
        each = [tokens_of(known, gain) for known in asked.requests] or [1 + accepted(gain, own.usual.drafts)]
        tokens = fmean(before_the_end(one, asked.remaining) for one in each)
        kind = own.served.by_kind[StepKind.COPIES] if policy.first_pass is FirstPass.PROMPT_LOOKUP else 1.0
        scale = float(own.served.by_kind[StepKind.DRAFTS] if policy.drafters else kind)
        scale *= float(own.served.errors(asked.bucket)[list(own.policies).index(policy)])
        late = own.served.plain * catch_up / max(1.0, asked.remaining)
        return 1 / (between_ends(own, scale * seconds) / tokens + late), seconds + catch_up, None, tokens
    context = seconds - own.times.seconds[policy, asked.bucket]
    runs = [run(known, policy.num_nodes - 1) for known in asked.requests]
    shares = sorted(((-chance, request) for request, one in enumerate(runs) for chance in one))
    rows, tokens, best = [1] * count, 1.0, None
    plain = own.times.seconds[own.off, asked.bucket] - seconds_of(own.verify, asked.bucket)
    error = float(own.served.errors(asked.bucket)[list(own.policies).index(own.off)])
    plain += (error - 1) * own.times.seconds[own.off, asked.bucket]
    for granted, (chance, request) in enumerate(shares, 1):
        rows[request] += 1
        tokens -= chance / count
        verified = asked.bucket + granted
        took = plain + seconds_of(own.verify, verified) + context * verified / (asked.bucket * policy.num_nodes)
        brought = before_the_end(tokens, asked.remaining)
        rate = brought / between_ends(own, float(own.served.by_kind[StepKind.COPIES]) * took)
        if best is None or rate > best[0]:
            best = rate, took, tuple(rows), brought
    return best


@dataclass
class SlowRepeats:
    """`Repeats`, which looks for n-grams in the whole text."""

    tokens: list[int] = field(default_factory=list)
    length: int = 0
    place: int = 0
    read: int = 0

    def follow(self, text: Sequence[int]) -> list[tuple[int, bool]]:
        new, self.read = text[self.read :], len(text)
        outcomes = []
        for token in new:
            if self.length:
                right = self.tokens[self.place] == token
                outcomes.append((ENTRIES[self.length], right))
                self.length, self.place = (min(self.length + 1, LONGEST), self.place + 1) if right else (0, 0)
            self.tokens.append(token)
            if not self.length:
                self._search()
        return outcomes

    def _search(self) -> None:
        """The latest place behind the longest of 4, 2 or 1 last tokens, and how much more is equal there."""
        text, end = self.tokens, len(self.tokens)
        for size in (4, 2, 1):
            places = [n for n in range(size, end) if text[n - size : n] == text[-size:]]
            if places:
                self.place = places[-1]
                equal = (n for n in range(min(LONGEST, self.place)) if text[self.place - 1 - n] != text[end - 1 - n])
                self.length = next(equal, min(LONGEST, self.place))
                return
