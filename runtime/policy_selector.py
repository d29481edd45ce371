"""Chooses the policy with the most tokens a second at this batch size: forecast tokens a step over step time.

Tree nodes are nearly free while a step is bound by memory bandwidth, and cost their full price once it is bound by
compute, so a tree that pays for one request may not pay for sixteen. Step times are measured when the engine is made,
tokens a step are forecast by the bundle's calibration, and both are corrected by what serving shows: texts differ, and
grammars, penalties and sampling add to a step. If no tree pays, plain decoding is served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from math import inf
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from d2sd.policies import LOOKUP, MAX_NODES, DrafterRole, FirstPass
from d2sd.runtime.acceptance import Acceptance, Gain, RequestAcceptance
from d2sd.runtime.speculation.policy import Off, Policy
from d2sd.runtime.step_times import Forecast, RowTimes, StepTimes, curves_of

#: Forecast speedup over plain decoding that speculation must exceed to begin: forecasts and clocks err, and beginning
#: has a cost. What runs already has been measured and goes on while it is faster at all.
MARGIN = 1.05
#: The same of a copy. It begins at no cost, but in each step it is found and its tree is cut.
_COPY_MARGIN = 1.15
#: EMA windows in steps for the corrections of step times: of plain decoding, which is the speed of the machine, and of
#: speculation against it, which a few steps show.
_PLAIN_WINDOW, _SPECULATION_WINDOW = 32, 8
#: Largest factor that one step can show: a step during which the machine did something else says nothing.
_MOST_FACTOR = 2.0
#: Steps that are served until a guessed time counts as measured.
_SHOWN = 8
#: Steps of plain decoding until a correction of step times decays back and speculation is retried: a retry has a cost,
#: which is less than that of acceptance, because step times are learned in fewer steps.
_TIME_DECAY_STEPS = 256


class Begun(NamedTuple):
    """A step whose policy has been chosen."""

    at: float  # seconds of the selector's clock
    seconds: float  # that it should take, uncorrected
    rows: tuple[int, ...] | None = None  # most nodes of each request's tree; None: those of the policy
    bucket: int = 1  # of its requests


class Asked(NamedTuple):
    """The arguments of `PolicySelector.choose`."""

    bucket: int
    temperature: float
    context: float
    remaining: float
    pending: Mapping[DrafterRole, int]
    requests: Sequence[RequestAcceptance]


class Plan(NamedTuple):
    """A step of one policy."""

    rate: float  # tokens of a request a second, by what is known
    seconds: float  # that it should take, uncorrected
    rows: tuple[int, ...] | None  # see `Begun`


@dataclass(slots=True)
class PolicySelector:
    """Chooses a policy for every step; plain decoding is among them."""

    policies: Sequence[Policy]
    times: StepTimes
    forecast: Forecast
    clock: Callable[[], float] = time.perf_counter  # seconds
    slots: int = 7  # most tokens of a copy
    verify: RowTimes | None = None  # where rows of a copy can be left out, on a CPU: what they cost
    usual: Acceptance = field(default_factory=Acceptance)  # of all requests
    plain_scale: float = 1.0  # seconds of a step without a drafter, observed over measured
    speculation_scale: float = 1.0  # the same of policies that run a drafter, over `plain_scale`
    off: Policy = field(init=False)
    _drafts: bool = field(init=False, default=False)  # whether the last step that was not a copy's ran a drafter
    begun: Begun = field(init=False, default=Begun(0.0, inf))  # the step that was chosen last
    _gains: dict[tuple[Policy, float], Gain] = field(init=False, default_factory=dict)  # of one temperature
    _ended: float = field(init=False, default=-inf)  # when the step before it did
    #: Times that were guessed, corrected by steps that were served, and the number of these; then they are measured.
    _shown: dict[tuple[Policy, int], int] = field(init=False)

    def __post_init__(self) -> None:
        (self.off,) = (policy for policy in self.policies if isinstance(policy, Off))
        self._shown = dict.fromkeys(self.times.guessed, 0)

    def fresh(self) -> PolicySelector:
        """A selector by the same measurements that has seen no step."""
        return PolicySelector(self.policies, self.times, self.forecast, self.clock, self.slots, self.verify)

    def choose(
        self,
        bucket: int,
        temperature: float,
        context: float = 0,
        remaining: float = inf,
        pending: Mapping[DrafterRole, int] = MappingProxyType({}),
        requests: Sequence[RequestAcceptance] = (),
    ) -> Policy:
        """The policy with the most tokens a second for a batch of `bucket` requests; `launched` says that it is served.

        `temperature`, `context` and `remaining`, tokens that may still be generated, are means of its requests.
        `pending` are the rows that each drafter must catch up with before it drafts: after plain decoding of a whole
        batch that takes several steps' time, which the last tokens of an answer do not earn back. `requests` are what
        each has shown: those whose text repeats itself gain from copies, whatever the others do.
        """
        asked = Asked(bucket, temperature, context, remaining, pending, requests)
        plans = {policy: plan for policy in self.policies if (plan := self._plan(policy, asked))}
        drafting = 1.0 if self._drafts else MARGIN
        paying = [
            policy
            for policy, plan in plans.items()
            if plan.rate > (drafting if policy.drafters else _COPY_MARGIN) * plans[self.off].rate
        ]
        best = max(paying, key=lambda policy: plans[policy].rate, default=self.off)
        self.begun = Begun(self.clock(), plans[best].seconds, plans[best].rows, asked.bucket)
        return best

    def launched(self, policy: Policy) -> None:
        """The step that was chosen last runs: from now on speculation has begun, or ended."""
        if policy.drafters or policy is self.off:
            self._drafts = policy is not self.off

    def _plan(self, policy: Policy, asked: Asked) -> Plan | None:
        """The best step of this policy; None if its steps were not measured, or if it has nothing to copy."""
        seconds = self.times.step(policy, asked.bucket, asked.context)
        if seconds is None:
            return None
        catch_up = self.times.catch_up(policy, asked.pending)
        scale = self.speculation_scale if policy.drafters else 1.0  # a copy's step is a plain one of more rows

        def plan(seconds: float, tokens: float, rows: tuple[int, ...] | None = None) -> Plan:
            rate = 1 / (scale * seconds / tokens + catch_up / max(1.0, asked.remaining))
            return Plan(rate, seconds + catch_up, rows)

        if self.verify is None or policy.first_pass is not FirstPass.PROMPT_LOOKUP or not asked.requests:
            return plan(seconds, self.expected(policy, asked.temperature, asked.remaining, asked.requests))
        most, count = asked.bucket * policy.num_nodes, len(asked.requests)
        added = seconds - self.times.seconds[policy, asked.bucket]  # by the context, which every row reads
        # What each row of a copy brings, the best first; of one request each brings less than the one before it.
        runs = [known.run(policy.num_nodes - 1) for known in asked.requests]
        shares = sorted(((chance, request) for request, run in enumerate(runs) for chance in run), reverse=True)
        rows, verified, tokens, best = [1] * count, asked.bucket, 1.0, None
        for chance, request in shares:
            rows[request] += 1
            verified += 1
            tokens += chance / count
            seconds = self.verify(verified) + added * verified / most
            found = plan(seconds, _before_the_end(tokens, asked.remaining), tuple(rows))
            best = found if best is None or found.rate > best.rate else best
        return best

    def expected(
        self, policy: Policy, temperature: float, remaining: float = inf, requests: Sequence[RequestAcceptance] = ()
    ) -> float:
        """Forecast tokens a step and request, corrected by the observed acceptance, of which `remaining` are still to
        be generated.
        """
        gain = self._gain(policy, temperature)
        taus = [known.tau(gain) for known in requests] or [self.usual.tau(gain)]
        return fmean(_before_the_end(tau, remaining) for tau in taus)

    def _gain(self, policy: Policy, temperature: float) -> Gain:
        """`forecast_gain`, kept while the temperature stays."""
        key = policy, temperature
        if key not in self._gains:
            if len(self._gains) >= len(self.policies):
                self._gains.clear()
            self._gains[key] = forecast_gain(self.forecast, policy, temperature, self.slots)
        return self._gains[key]

    def update(
        self,
        policy: Policy,
        temperature: float,
        accepted: Sequence[int],
        begun: Begun | None,
        copied: Sequence[bool] = (),
        requests: Sequence[RequestAcceptance] = (),
    ) -> None:
        """Learn from a step that ends now: its time, and the tokens that each request accepted, bonus included;
        none if all requests had ended. `copied` says of each whether a copy won, `requests` are what it has shown.

        Steps end in the order in which they were chosen. A step that was launched before another ended is timed from
        that end. `begun` is None if other work was done meanwhile, so that the step's time says nothing.
        """
        started, self._ended = self._ended, self.clock()
        factor = None
        if begun is not None:
            factor = (self._ended - max(begun.at, started)) / begun.seconds
            factor = min(max(factor, 1 / _MOST_FACTOR), _MOST_FACTOR)
        if not accepted:
            return
        if begun and factor is not None and begun.rows is None and (policy, begun.bucket) in self._shown:
            self._learn((policy, begun.bucket), factor)
        elif factor is not None and not policy.drafters:
            self.plain_scale += (factor - self.plain_scale) / _PLAIN_WINDOW
        elif factor is not None:
            self.speculation_scale += (factor / self.plain_scale - self.speculation_scale) / _SPECULATION_WINDOW
        if policy == self.off:  # nothing was drafted: the texts may have changed, so decay until it is tried again
            self.usual.decay()
            for known in requests:
                known.decay()
            self.speculation_scale += (1 - self.speculation_scale) / _TIME_DECAY_STEPS
            return
        gain = self._gain(policy, temperature)
        drafted = [not won for won in copied] or [True] * len(accepted)
        self.usual.observe(gain, [one - 1 for one in compress(accepted, drafted)])
        for known, one in compress(zip(requests, accepted, strict=False), drafted):
            known.observe(gain, one - 1)

    def _learn(self, step: tuple[Policy, int], factor: float) -> None:
        """Correct the guessed seconds of a step by the mean of what was served, at this speed of the machine."""
        self._shown[step] += 1
        scale = self.plain_scale * (self.speculation_scale if step[0].drafters else 1.0)
        seconds = self.times.seconds[step] * (1 + (factor / scale - 1) / self._shown[step])
        self.times = replace(self.times, seconds={**self.times.seconds, step: seconds})
        if self._shown[step] == _SHOWN:
            del self._shown[step]


def _before_the_end(tau: float, remaining: float) -> float:
    """Tokens of a step, of which at most `remaining` are still to be generated.

    Accepted lengths are taken to be geometric with mean tau, which are min(length, n) tokens in the mean of
    tau (1 - (1 - 1 / tau)^n).
    """
    return tau * (1 - (1 - 1 / tau) ** max(1.0, remaining)) if tau > 1 else 1.0


def forecast_gain(forecast: Forecast, policy: Policy, temperature: float, slots: int = 7) -> Gain:
    """The forecast of a policy, interpolated linearly between T = 0 and T = 1; a copy has at most `slots` tokens."""
    curves, copying = curves_of(forecast, policy), curves_of(forecast, policy, LOOKUP)
    drafts = _at(curves, policy.num_nodes, temperature)
    depth = max(1, min(slots, policy.num_nodes - 1))
    if not policy.copies:
        return Gain(drafts, depth)
    if policy.first_pass is FirstPass.PROMPT_LOOKUP:
        return Gain(drafts, depth, depth)
    most = _at(copying, MAX_NODES, temperature) - _at(curves, MAX_NODES, temperature)
    more = _at(copying, policy.num_nodes, temperature) - drafts
    return Gain(drafts, depth, slots, min(1.0, max(0.0, more / most)) if most > 0 else 1.0)


def forecast_tau(forecast: Forecast, policy: Policy, temperature: float) -> float:
    """Tokens a step of a policy in the mean, uncorrected: by its curve with copies, if they compete and it is known."""
    copying = curves_of(forecast, policy, LOOKUP) if policy.lookup else None
    return 1 + _at(copying or curves_of(forecast, policy), policy.num_nodes, temperature)


def _at(curves: tuple[Sequence[float], Sequence[float]] | None, nodes: int, temperature: float) -> float:
    if curves is None:
        return 0.0
    greedy, sampled = (curve[min(nodes, len(curve)) - 1] - 1 for curve in curves)
    return greedy + min(max(temperature, 0.0), 1.0) * (sampled - greedy)
