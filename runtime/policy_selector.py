"""Chooses the policy with the most tokens a second at this batch size: forecast tokens a step over step time.

Tree nodes are nearly free while a step is bound by memory bandwidth, and cost their full price once it is bound by
compute, so a tree that pays for one request may not pay for sixteen. Step times are measured when the engine is made,
tokens a step are forecast by the bundle's calibration, and both are corrected by what serving shows: texts differ, and
grammars, penalties and sampling add to a step. If no tree pays, plain decoding is served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from itertools import compress
from math import inf
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from d2sd.policies import LOOKUP, MAX_NODES, DrafterRole, FirstPass
from d2sd.runtime.acceptance import Acceptance, Array, Gain, Gains, RequestAcceptance, Shown
from d2sd.runtime.request import bucket as bucket_of
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.served_times import TIME_DECAY_STEPS, Choice, ServedTimes, StepKind, kind_of
from d2sd.runtime.speculation.policy import Off, Policy
from d2sd.runtime.step_times import CONTEXT, Forecast, RowTimes, StepTimes, curves_of

# Shape letters: P policies, R requests.

#: Forecast speedup over plain decoding that speculation must exceed to begin: forecasts and clocks err, and beginning
#: has a cost. What runs already has been measured and goes on while it is faster at all.
MARGIN = 1.05
#: The same of a copy. It begins at no cost, but in each step it is found and its tree is cut.
_COPY_MARGIN = 1.15
#: Steps without a drafter for which drafters are not considered again while the batch does not shrink: what speaks for
#: them changes slowly, and to ask takes longer than all else that the host does in such a step.
_HOLD = 8
#: EMA window in steps for what chosen steps bring of what they promised: the best of many forecasts is most likely one
#: that errs, and the more policies pay, the less.
_PROMISE_WINDOW = 32
#: Steps that are served until a guessed time counts as measured.
_SHOWN = 8
#: Mean temperatures of batches whose forecasts are kept.
_TEMPERATURES = 8


class Asked(NamedTuple):
    """The arguments of `PolicySelector.choose`."""

    bucket: int
    temperature: float
    context: float
    remaining: float
    pending: Mapping[DrafterRole, int]
    requests: SequenceOf[RequestAcceptance]


class Plans(NamedTuple):
    """The best step of each policy."""

    tokens: Array  # [P], of each request in the mean
    rates: Array  # [P], tokens of a request a second, by what is known; NaN: not measured, or nothing to copy
    seconds: Array  # [P], that it should take, uncorrected
    rows: Mapping[int, tuple[int, ...]]  # see `Choice`, by the policy's place


@dataclass(slots=True)
class PolicySelector:
    """Chooses a policy for every step; plain decoding is among them."""

    policies: SequenceOf[Policy]
    times: StepTimes
    forecast: Forecast
    clock: Callable[[], float] = time.perf_counter  # seconds
    slots: int = 7  # most tokens of a copy
    verify: RowTimes | None = None  # where rows of a copy can be left out, on a CPU: what they cost
    usual: Acceptance = field(default_factory=Acceptance)  # of all requests
    #: Tokens of chosen steps over those that they promised, by `StepKind`; of plain decoding always 1.
    kept: Array = field(default_factory=lambda: np.ones(len(StepKind)), compare=False)
    served: ServedTimes = field(init=False, compare=False)  # what steps took of what was measured
    off: Policy = field(init=False)
    copies: bool = field(init=False)  # whether a policy copies, so that texts must be read
    _drafts: bool = field(init=False, default=False)  # whether the last step that was not a copy's ran a drafter
    _held: int = field(init=False, default=0)  # steps without a drafter for which the choice holds
    _requests: int = field(init=False, default=0)  # of the step before
    #: Times that were guessed, corrected by steps that were served, and the number of these; then they are measured.
    _shown: dict[tuple[Policy, int], int] = field(init=False)
    _measured: StepTimes = field(init=False)  # `times`, before any was corrected
    _places: dict[Policy, int] = field(init=False)
    _uses: Array = field(init=False, compare=False)  # [P, roles], 1 where the policy runs this drafter, else 0
    _gains: dict[float, Gains] = field(init=False, compare=False, default_factory=dict)  # by temperature
    _costs: dict[int, tuple[Array, Array]] = field(init=False, compare=False, default_factory=dict)  # by bucket
    #: By bucket: least seconds that a row of a copy adds to a step of plain decoding.
    _row_seconds: dict[int, float] = field(init=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        (self.off,) = (policy for policy in self.policies if isinstance(policy, Off))
        self.copies = any(policy.copies for policy in self.policies)
        self._shown = dict.fromkeys(self.times.guessed, 0)
        self._measured = self.times
        self._places = {policy: place for place, policy in enumerate(self.policies)}
        self.served = ServedTimes(self.policies, self.clock)
        self._uses = np.array([[role in policy.drafters for role in DrafterRole] for policy in self.policies], float)

    def fresh(self) -> PolicySelector:
        """A selector by the same measurements that has seen no step."""
        return PolicySelector(self.policies, self._measured, self.forecast, self.clock, self.slots, self.verify)

    def choose_for(self, sequences: SequenceOf[Sequence], pending: Mapping[DrafterRole, int]) -> Choice:
        """Read what is new of the requests' texts, and choose the policy of a step over them; see `choose`."""
        count = len(sequences)
        for one in sequences:
            one.acceptance = one.acceptance or self.usual.request(speculates=one.speculates)
            if self.copies and one.speculates:
                one.acceptance.read(one.tokens)
        temperature = sum(one.request.sampling.temperature for one in sequences) / count
        context = sum(one.cached for one in sequences) / count
        remaining = sum(one.remaining for one in sequences) / count
        shown = [one.acceptance for one in sequences]
        return self.choose(bucket_of(count), temperature, context, remaining, pending, shown)

    def choose(
        self,
        bucket: int,
        temperature: float,
        context: float = 0,
        remaining: float = inf,
        pending: Mapping[DrafterRole, int] = MappingProxyType({}),
        requests: SequenceOf[RequestAcceptance] = (),
    ) -> Choice:
        """The policy with the most tokens a second for a batch of `bucket` requests; nothing changes by asking.

        `temperature`, `context` and `remaining`, tokens that may still be generated, are means of its requests.
        `pending` are the rows that each drafter must catch up with before it drafts: after plain decoding of a whole
        batch that takes several steps' time, which the last tokens of an answer do not earn back. `requests` are what
        each has shown: those whose text repeats itself gain from copies, whatever the others do.
        """
        asked = Asked(bucket, temperature, context, remaining, pending, requests)
        if self._holds(asked):
            return Choice(self.off, self._plain_seconds(asked), bucket, temperature)
        plans = self.plans(asked)
        best = self._places[self.off]
        margins = np.array([1.0, _COPY_MARGIN, 1.0 if self._drafts else MARGIN]) / self.kept
        margins = margins[self.served.kinds]
        paying = plans.rates > margins * plans.rates[best]
        if paying.any():
            best = int(np.argmax(np.where(paying, plans.rates, 0.0)))
        promised = float(plans.tokens[best])
        return Choice(
            self.policies[best], float(plans.seconds[best]), bucket, temperature, plans.rows.get(best), promised
        )

    def _holds(self, asked: Asked) -> bool:
        """Whether plain decoding remains the choice: drafters were considered some steps ago for as many requests or
        fewer, and no copies are worth their rows.
        """
        if self.verify is None or not self._held or not 0 < self._requests <= len(asked.requests):
            return False
        if asked.bucket not in self._row_seconds:
            return False
        error = self.served.errors(asked.bucket)[self._places[self.off]]
        plain = float(self.served.between_ends(error * self._plain_seconds(asked)))
        row = self.served.plain * float(self.served.by_kind[StepKind.COPIES]) * self._row_seconds[asked.bucket]
        count, margin = len(asked.requests), _COPY_MARGIN / float(self.kept[StepKind.COPIES])
        price = margin * count * row / plain
        return sum(known.worth(price, self.slots) for known in asked.requests) <= (margin - 1) * count

    def _plain_seconds(self, asked: Asked) -> float:
        """Seconds of a step of plain decoding."""
        seconds = self.times.step(self.off, asked.bucket, asked.context)
        assert seconds is not None, "plain decoding is measured, or guessed, for all batches"
        return seconds

    def plans(self, asked: Asked) -> Plans:
        """The best step of each policy."""
        gains = self._gains_of(asked.temperature)
        shown = self.usual.shown(asked.requests, self.slots if self.copies else 0)
        tokens = _before_the_end(gains.tokens(shown), asked.remaining).mean(1)
        if asked.bucket not in self._costs:
            self._costs[asked.bucket] = self.times.of_bucket(self.policies, asked.bucket)
            if self.verify is not None:
                more = np.arange(1.0, 1 + asked.bucket * self.slots)
                added = self.verify(asked.bucket + more) - self.verify(np.array([float(asked.bucket)]))
                self._row_seconds[asked.bucket] = float((added / more).min())
        seconds, added = self._costs[asked.bucket]
        added = added * max(0.0, asked.context - CONTEXT)
        seconds = seconds + added
        catch_up = self._uses @ [asked.pending.get(role, 0) * self.times.pending.get(role, 0.0) for role in DrafterRole]
        scale = self.served.by_kind[self.served.kinds] * self.served.errors(asked.bucket)
        late = self.served.plain * catch_up / max(1.0, asked.remaining)
        rates = 1 / (self.served.between_ends(scale * seconds) / tokens + late)
        plans = Plans(tokens, rates, seconds + catch_up, {})
        if self.verify is None or not asked.requests:
            return plans
        return self._with_shares(plans, self.verify, added, asked, shown)

    def _with_shares(self, plans: Plans, verify: RowTimes, added: Array, asked: Asked, shown: Shown) -> Plans:
        """The plans with trees of a copy cut to the rows that pay; `added` [P] seconds are the context's.

        Rows are granted the best first, by what they bring; of one request each brings less than the one before it.
        """
        tokens, rates, seconds, rows = *(each.copy() for each in plans[:3]), dict[int, tuple[int, ...]]()
        order = np.argsort(-shown.runs, axis=None, kind="stable")
        chances, (request, ahead) = shown.runs.ravel()[order], np.unravel_index(order, shown.runs.shape)
        verified, count = asked.bucket + np.arange(1.0, len(order) + 1), len(asked.requests)
        off, alone = self._places[self.off], verify(np.array([float(asked.bucket)]))
        plain = self.served.errors(asked.bucket)[off] * self._costs[asked.bucket][0][off]
        of_rows = plain + verify(verified) - alone  # a step of plain decoding, and what rows add to it
        for place in np.flatnonzero(self.served.kinds == StepKind.COPIES).tolist():
            nodes = self.policies[place].num_nodes
            fits = np.flatnonzero((ahead < nodes - 1) & (chances > 0))
            took = (of_rows + added[place] * verified / (asked.bucket * nodes))[: len(fits)]
            brought = _before_the_end(1 + np.cumsum(chances[fits]) / count, asked.remaining)
            found = brought / self.served.between_ends(self.served.by_kind[StepKind.COPIES] * took)
            rates[place] = np.nan
            if len(fits) and not np.isnan(plans.rates[place]):
                best = int(np.argmax(found))
                tokens[place], rates[place], seconds[place] = brought[best], found[best], took[best]
                granted = np.bincount(request[fits[: best + 1]], minlength=count)
                rows[place] = tuple((1 + granted).tolist())
        return Plans(tokens, rates, seconds, rows)

    def _gains_of(self, temperature: float) -> Gains:
        """The forecasts of all policies."""
        if temperature not in self._gains:
            if len(self._gains) >= _TEMPERATURES:
                self._gains.clear()
            forecasts = [forecast_gain(self.forecast, policy, temperature, self.slots) for policy in self.policies]
            self._gains[temperature] = Gains.of(forecasts)
        return self._gains[temperature]

    def update(
        self,
        choice: Choice,
        accepted: SequenceOf[int],
        copied: SequenceOf[bool] = (),
        requests: SequenceOf[RequestAcceptance] = (),
        began: float | None = None,
        waited: float | None = None,
    ) -> None:
        """Learn from a step that ends now: its time, and the tokens that each request accepted, bonus included;
        none if all requests had ended. `copied` says of each whether a copy won, or it does not speculate; `requests`
        are what it has shown.

        Steps end in the order in which they were chosen. A step that `began`, by the clock, before another ended is
        timed from that end; None if other work was done meanwhile, so that the step's time says nothing. Of the seconds
        since then the host `waited` so many for this step's tokens; None: what it did besides is not known.
        """
        policy = choice.policy
        if policy.drafters or policy is self.off:
            self._drafts = policy is not self.off
        self._held, self._requests = 0 if policy.drafters else (self._held or 1 + _HOLD) - 1, len(requests)
        factor, hidden = self.served.observe(choice.seconds, began if accepted else None, waited)
        if not accepted:
            return
        if factor is not None and choice.rows is None and (policy, choice.bucket) in self._shown:
            self._learn((policy, choice.bucket), factor)
        elif factor is not None:
            self.served.correct(choice, factor)
        if policy is self.off or hidden:
            self.served.forget()
        if policy is self.off:  # the texts may have changed, so decay until drafts are tried again
            self.usual.decay(requests)
            self.kept += (1 - self.kept) / TIME_DECAY_STEPS
            return
        kind = kind_of(policy)
        self.kept[kind] += (fmean(accepted) / choice.tokens - self.kept[kind]) / _PROMISE_WINDOW
        gain = self._gains_of(choice.temperature).of_one(self._places[policy])
        drafted = [not won for won in copied] or [True] * len(accepted)
        seen = [one - 1 for one in compress(accepted, drafted)]
        self.usual.observe(gain, seen, [*compress(requests, drafted)])

    def _learn(self, step: tuple[Policy, int], factor: float) -> None:
        """Correct the guessed seconds of a step by the mean of what was served, at this speed of the machine."""
        self._shown[step] += 1
        seconds = self.times.seconds[step] * (1 + (factor / self.served.scale_of(step[0]) - 1) / self._shown[step])
        self.times = replace(self.times, seconds={**self.times.seconds, step: seconds})
        self._costs.pop(step[1], None)
        if self._shown[step] == _SHOWN:
            del self._shown[step]


def _before_the_end(tokens: Array, remaining: float) -> Array:
    """Tokens of a step, of which at most `remaining` are still to be generated.

    Accepted lengths are taken to be geometric with mean tau, which are min(length, n) tokens in the mean of
    tau (1 - (1 - 1 / tau)^n).
    """
    return tokens * (1 - (1 - 1 / tokens) ** max(1.0, remaining))


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


def _at(curves: tuple[SequenceOf[float], SequenceOf[float]] | None, nodes: int, temperature: float) -> float:
    if curves is None:
        return 0.0
    greedy, sampled = (curve[min(nodes, len(curve)) - 1] - 1 for curve in curves)
    return greedy + min(max(temperature, 0.0), 1.0) * (sampled - greedy)
