"""Chooses the policy with the most tokens a second at this batch size: forecast tokens a step over step time.

Tree nodes are nearly free while a step is bound by memory bandwidth, and cost their full price once it is bound by
compute, so a tree that pays for one request may not pay for sixteen. Step times are measured when the engine is made,
tokens a step are forecast by the bundle's calibration, and both are corrected by what serving shows: texts differ, and
grammars, penalties and sampling add to a step. If no tree pays, plain decoding is served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import inf
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from d2sd.policies import LOOKUP, MAX_NODES, DrafterRole, FirstPass
from d2sd.runtime.acceptance import Acceptance, Gain, RequestAcceptance
from d2sd.runtime.speculation.policy import Off, Policy
from d2sd.runtime.step_times import Forecast, StepTimes

#: Forecast speedup over plain decoding that speculation must exceed to begin: forecasts and clocks err, and beginning
#: has a cost. What runs already has been measured and goes on while it is faster at all.
MARGIN = 1.05
#: EMA windows in steps for the corrections of step times: of plain decoding, which is the speed of the machine, and of
#: speculation against it, which a few steps show.
_PLAIN_WINDOW, _SPECULATION_WINDOW = 32, 8
#: Largest factor that one step can show: a step during which the machine did something else says nothing.
_MOST_FACTOR = 2.0
#: Steps of plain decoding until a correction of step times decays back and speculation is retried: a retry has a cost,
#: which is less than that of acceptance, because step times are learned in fewer steps.
_TIME_DECAY_STEPS = 256


class Begun(NamedTuple):
    """A step whose policy has been chosen."""

    at: float  # seconds of the selector's clock
    seconds: float  # that it should take, uncorrected


@dataclass(slots=True)
class PolicySelector:
    """Chooses a policy for every step; plain decoding is among them."""

    policies: Sequence[Policy]
    times: StepTimes
    forecast: Forecast
    clock: Callable[[], float] = time.perf_counter  # seconds
    slots: int = 7  # most tokens of a copy
    usual: Acceptance = field(default_factory=Acceptance)  # of all requests
    plain_scale: float = 1.0  # seconds of a step of plain decoding, observed over measured
    speculation_scale: float = 1.0  # the same of every other policy, over `plain_scale`
    off: Policy = field(init=False)
    _speculates: bool = field(init=False, default=False)  # the step that was chosen last
    begun: Begun = field(init=False, default=Begun(0.0, inf))  # the step that was chosen last
    _ended: float = field(init=False, default=-inf)  # when the step before it did

    def __post_init__(self) -> None:
        (self.off,) = (policy for policy in self.policies if isinstance(policy, Off))

    def choose(
        self,
        bucket: int,
        temperature: float,
        context: float = 0,
        remaining: float = inf,
        pending: Mapping[DrafterRole, int] = MappingProxyType({}),
        requests: Sequence[RequestAcceptance] = (),
    ) -> Policy:
        """The policy with the most tokens a second for a batch of `bucket` requests; its step begins now.

        `temperature`, `context` and `remaining`, tokens that may still be generated, are means of its requests.
        `pending` are the rows that each drafter must catch up with before it drafts: after plain decoding of a whole
        batch that takes several steps' time, which the last tokens of an answer do not earn back. `requests` are what
        each has shown: those whose text repeats itself gain from copies, whatever the others do.
        """

        def rate(policy: Policy, seconds: float) -> float:
            step = seconds if policy is self.off else self.speculation_scale * seconds
            catch_up = self.times.catch_up(policy, pending)
            tokens = self.expected(policy, temperature, remaining, requests)
            return 1 / (step / tokens + catch_up / max(1.0, remaining))

        steps = {policy: seconds for policy in self.policies if (seconds := self.times.step(policy, bucket, context))}
        rates = {policy: rate(policy, seconds) for policy, seconds in steps.items()}
        best = max(rates, key=lambda policy: rates[policy])
        best = best if rates[best] > (1.0 if self._speculates else MARGIN) * rates[self.off] else self.off
        self._speculates = best is not self.off
        self.begun = Begun(self.clock(), steps[best] + self.times.catch_up(best, pending))
        return best

    def expected(
        self, policy: Policy, temperature: float, remaining: float = inf, requests: Sequence[RequestAcceptance] = ()
    ) -> float:
        """Forecast tokens a step and request, corrected by the observed acceptance, of which `remaining` are still to
        be generated.

        Accepted lengths are taken to be geometric with mean tau, which are min(length, n) tokens in the mean of
        tau (1 - (1 - 1 / tau)^n).
        """
        gain = forecast_gain(self.forecast, policy, temperature, self.slots)
        taus = [known.tau(gain) for known in requests] or [self.usual.tau(gain)]
        left = max(1.0, remaining)
        return fmean(tau * (1 - (1 - 1 / tau) ** left) if tau > 1 else 1.0 for tau in taus)

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
        if policy == self.off:  # nothing was drafted: the texts may have changed, so decay until it is tried again
            if factor is not None:
                self.plain_scale += (factor - self.plain_scale) / _PLAIN_WINDOW
            self.usual.decay()
            for known in requests:
                known.decay()
            self.speculation_scale += (1 - self.speculation_scale) / _TIME_DECAY_STEPS
            return
        if factor is not None:
            self.speculation_scale += (factor / self.plain_scale - self.speculation_scale) / _SPECULATION_WINDOW
        gain = forecast_gain(self.forecast, policy, temperature, self.slots)
        drafted = [not won for won in copied] or [True] * len(accepted)
        self.usual.observe(gain, [one - 1 for one in compress(accepted, drafted)])
        for known, one in compress(zip(requests, accepted, strict=False), drafted):
            known.observe(gain, one - 1)


def forecast_gain(forecast: Forecast, policy: Policy, temperature: float, slots: int = 7) -> Gain:
    """The forecast of a policy, interpolated linearly between T = 0 and T = 1; a copy has at most `slots` tokens."""
    drafts = _at(forecast.get(policy.name), policy.num_nodes, temperature)
    depth = max(1, min(slots, policy.num_nodes - 1))
    if not policy.copies:
        return Gain(drafts, depth)
    if policy.first_pass is FirstPass.PROMPT_LOOKUP:
        return Gain(drafts, depth, depth)
    curves = forecast.get(policy.name + LOOKUP)
    most = _at(curves, MAX_NODES, temperature) - _at(forecast.get(policy.name), MAX_NODES, temperature)
    more = _at(curves, policy.num_nodes, temperature) - drafts
    return Gain(drafts, depth, slots, min(1.0, max(0.0, more / most)) if most > 0 else 1.0)


def forecast_tau(forecast: Forecast, policy: Policy, temperature: float) -> float:
    """Tokens a step of a policy in the mean, uncorrected: by its curve with copies, if they compete and it is known."""
    known = policy.name + LOOKUP if policy.lookup and policy.name + LOOKUP in forecast else policy.name
    return 1 + _at(forecast.get(known), policy.num_nodes, temperature)


def _at(curves: tuple[Sequence[float], Sequence[float]] | None, nodes: int, temperature: float) -> float:
    if curves is None:
        return 0.0
    greedy, sampled = (curve[min(nodes, len(curve)) - 1] - 1 for curve in curves)
    return greedy + min(max(temperature, 0.0), 1.0) * (sampled - greedy)
