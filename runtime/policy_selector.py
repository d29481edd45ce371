"""Chooses the policy with the most tokens a second at this batch size: forecast tokens a step over measured step time.

Tree nodes are nearly free while a step is bound by memory bandwidth, and cost their full price once it is bound by
compute, so a tree that pays for one request may not pay for sixteen. Step times are measured when the engine is made;
the forecast comes from the bundle's calibration and is corrected by the acceptance observed while serving. If no tree
pays, plain decoding is served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import torch

from d2sd.runtime.backends.model_runner import ModelRunner
from d2sd.runtime.batch import Batch
from d2sd.runtime.buckets import buckets
from d2sd.runtime.decode import decode_step
from d2sd.runtime.request import Limits
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.runtime.speculation.policy import Off, Policy

#: Tokens a step at T = 0 and at T = 1 by policy name; entry n is for n + 1 nodes.
Forecast = Mapping[str, tuple[Sequence[float], Sequence[float]]]

#: Forecast speedup over plain decoding that speculation must exceed: forecasts and clocks err.
MARGIN = 1.05
#: EMA window in request-steps for the acceptance correction: a few answers.
_EMA_WINDOW = 32
#: Steps of plain decoding until the correction decays back to 1 and speculation is retried; a retry has a cost too.
_DECAY_STEPS = 2048
_REPEATS = 5
#: Context tokens of the requests that are timed. Longer contexts add the same time to a step of every policy, which is
#: measured on plain decoding: they make trees cheaper against it.
_CONTEXT, _LONG_CONTEXT = 64, 512
#: Rows of pending context that are timed.
_PENDING = 128


@dataclass(slots=True)
class PolicySelector:
    """Chooses a policy for every step; plain decoding is among them."""

    policies: Sequence[Policy]
    seconds: Mapping[tuple[Policy, int], float]  # of a step, by policy and batch bucket; pruned policies are missing
    forecast: Forecast
    context_seconds: Mapping[int, float] = field(default_factory=dict)  # of a token more of context, by batch bucket
    pending_seconds: Sequence[float] = ()  # of a row of pending context, by drafter
    acceptance_scale: float = 1.0  # accepted drafts, observed over forecast
    off: Policy = field(init=False)

    def __post_init__(self) -> None:
        (self.off,) = (policy for policy in self.policies if isinstance(policy, Off))

    def choose(
        self, bucket: int, temperature: float, context: float = 0, remaining: float = inf, pending: Sequence[int] = ()
    ) -> Policy:
        """The policy with the most tokens a second for a batch of `bucket` requests.

        `temperature`, `context` and `remaining`, tokens that may still be generated, are means of its requests.
        `pending` are the rows that each drafter must catch up with before it drafts: after plain decoding of a whole
        batch that takes several steps' time, which the last tokens of an answer do not earn back.
        """
        added = self.context_seconds.get(bucket, 0.0) * max(0.0, context - _CONTEXT)
        late = [rows * seconds for rows, seconds in zip(pending, self.pending_seconds, strict=False)]

        def rate(policy: Policy, seconds: float) -> float:
            catch_up = sum(late[which] for which in policy.required_drafters if which < len(late))
            return 1 / ((seconds + added) / self.expected(policy, temperature) + catch_up / max(1.0, remaining))

        rates = {
            policy: rate(policy, seconds) for policy in self.policies if (seconds := self.seconds.get((policy, bucket)))
        }
        best = max(rates, key=lambda policy: rates[policy])
        return best if rates[best] > MARGIN * rates[self.off] else self.off

    def expected(self, policy: Policy, temperature: float) -> float:
        """Forecast tokens a step, corrected by the observed acceptance."""
        return 1 + self.acceptance_scale * (forecast_tau(self.forecast, policy, temperature) - 1)

    def update(self, policy: Policy, temperature: float, accepted: Sequence[int]) -> None:
        """Update the correction with the tokens that each request of a step accepted, bonus included."""
        drafts = forecast_tau(self.forecast, policy, temperature) - 1
        if drafts > 0:
            observed = (sum(accepted) / len(accepted) - 1) / drafts
            self.acceptance_scale += (observed - self.acceptance_scale) * len(accepted) / (_EMA_WINDOW + len(accepted))
        else:  # nothing was drafted: the texts may have changed, so decay until speculation is retried
            self.acceptance_scale += (1 - self.acceptance_scale) / _DECAY_STEPS


def forecast_tau(forecast: Forecast, policy: Policy, temperature: float) -> float:
    """Tokens a step of a policy, interpolated linearly between T = 0 and T = 1."""
    if policy.name not in forecast:
        return 1.0
    greedy, sampled = (curve[min(policy.num_nodes, len(curve)) - 1] for curve in forecast[policy.name])
    weight = min(max(temperature, 0.0), 1.0)
    return greedy + weight * (sampled - greedy)


def profile(
    runner: ModelRunner,
    policies: Sequence[Policy],
    forecast: Forecast,
    limits: Limits,
    advance: Callable[[int], None] = lambda buckets: None,
    calibration: Calibration | None = None,
) -> PolicySelector:
    """A selector with the costs of this machine; arguments as of `profile_step_cost`."""
    seconds = profile_step_cost(runner, policies, forecast, limits, advance, calibration)
    context = profile_context_cost(runner, seconds, limits)
    return PolicySelector(policies, seconds, forecast, context, profile_pending_cost(runner))


def profile_step_cost(
    runner: ModelRunner,
    policies: Sequence[Policy],
    forecast: Forecast,
    limits: Limits,
    advance: Callable[[int], None] = lambda buckets: None,
    calibration: Calibration | None = None,
    clock: Callable[[], float] = time.perf_counter,
    context: int = _CONTEXT,
) -> dict[tuple[Policy, int], float]:
    """Seconds of a step of every policy that may pay, by batch bucket 1, 2, 4, … up to the limits' batch.

    `policies` are sorted by their nodes: once a tree costs more than its best forecast gains, larger trees of the same
    policy are skipped. The runner's pools must be allocated; only page 0 is written. `clock` gives seconds; `context`
    is in tokens a request.
    """
    (off,) = (policy for policy in policies if isinstance(policy, Off))
    found: dict[tuple[Policy, int], float] = {}
    for bucket in buckets(limits.max_batch):
        batch = _dummy_batch(runner, limits, bucket, context)
        plain = found[off, bucket] = _time(runner, off, batch, calibration, clock)
        pruned: set[str] = set()
        for policy in policies:
            if policy is off or policy.name in pruned:
                continue
            seconds = found[policy, bucket] = _time(runner, policy, batch, calibration, clock)
            best = max(max(curve) for curve in forecast.get(policy.name, ([1.0],)))
            if seconds > best * plain:
                pruned.add(policy.name)
        advance(1)
    return found


def profile_context_cost(
    runner: ModelRunner, seconds: Mapping[tuple[Policy, int], float], limits: Limits
) -> dict[int, float]:
    """Seconds that a token more of context adds to a step, by batch bucket; `seconds` of `profile_step_cost`."""
    tokens = min(_LONG_CONTEXT, limits.max_context) - _CONTEXT
    if tokens <= 0:
        return {}
    off = next(policy for policy, _ in seconds if isinstance(policy, Off))
    longer = profile_step_cost(runner, [off], {}, limits, context=_LONG_CONTEXT)
    return {size: max(0.0, longer[off, size] - seconds[off, size]) / tokens for _, size in longer}


def profile_pending_cost(runner: ModelRunner) -> list[float]:
    """Seconds of a row of pending context, by drafter."""
    found = []
    for drafter in range(runner.drafters):
        taken = []
        for _ in range(1 + _REPEATS):
            _wait(runner)
            start = time.perf_counter()
            runner.compute_context(drafter, _PENDING)
            _wait(runner)
            taken.append(time.perf_counter() - start)
        found.append(min(taken[1:]) / _PENDING)
    return found


def _time(
    runner: ModelRunner, policy: Policy, batch: Batch, calibration: Calibration | None, clock: Callable[[], float]
) -> float:
    """Least seconds of a decode step as the engine serves it: other work on the machine only ever adds to it.

    The first run is a warm-up.
    """
    taken = []
    for _ in range(1 + _REPEATS):
        _wait(runner)
        start = clock()
        runner.sync_drafters(policy.required_drafters)
        decode_step(runner, policy, batch, calibration)
        _wait(runner)
        taken.append(clock() - start)
    return min(taken[1:])


def _dummy_batch(runner: ModelRunner, limits: Limits, size: int, context: int) -> Batch:
    """Greedy requests with `context` tokens of context, or fewer if the limits are lower."""
    pages = limits.pages_for(min(context, limits.max_context)) + 1
    return Batch.dummy(size, pages, (pages - 1) * limits.page_size, runner.vocab_size, runner.device)


def _wait(runner: ModelRunner) -> None:
    if runner.device.startswith("cuda"):
        torch.cuda.synchronize()
