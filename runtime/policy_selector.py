"""Which tree pays at this batch size: a forecast of tokens a step, over measured costs of a step.

A tree's rows are nearly free while the device waits for weights and cost their full price once it computes, so what
pays for one request does not pay for sixteen. Costs are measured when the engine is made; the forecast comes from the
bundle's calibration and is corrected by what is accepted while serving. Where nothing pays, plain decoding is served.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from d2sd.runtime.backends.model_runner import ModelRunner
from d2sd.runtime.batch import Batch
from d2sd.runtime.buckets import buckets
from d2sd.runtime.decode import decode_step
from d2sd.runtime.request import Limits
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.runtime.speculation.policy import Off, Policy

#: Tokens a step at T = 0 and at T = 1 by policy name; entry n is with n + 1 rows.
Forecast = Mapping[str, tuple[Sequence[float], Sequence[float]]]

#: Speculation must promise this much more than plain decoding: forecasts and clocks err.
MARGIN = 1.05
#: Request-steps after which what was observed outweighs what was believed: a few answers.
_LEARNS = 32
#: Plain steps after which it is forgotten: long, for to try again costs as much as it could gain.
_FORGETS = 2048
_REPEATS = 5
#: Tokens of the requests that costs are measured with: a chat turn. Longer contexts make all steps dearer alike.
_CONTEXT = 256


@dataclass(slots=True)
class PolicySelector:
    """Chooses a policy for every step; plain decoding is among them."""

    policies: Sequence[Policy]
    seconds: Mapping[tuple[Policy, int], float]  # of a step, by batch bucket; where one is missing it does not pay
    forecast: Forecast
    acceptance_scale: float = 1.0  # observed drafts accepted over those forecast
    off: Policy = field(init=False)

    def __post_init__(self) -> None:
        (self.off,) = (policy for policy in self.policies if isinstance(policy, Off))

    def choose(self, bucket: int, temperature: float) -> Policy:
        """The policy with the most tokens a second for a batch of `bucket` requests at a mean temperature."""
        rates = {p: self.expected(p, temperature) / s for p in self.policies if (s := self.seconds.get((p, bucket)))}
        best = max(rates, key=lambda policy: rates[policy])
        return best if rates[best] > MARGIN * rates[self.off] else self.off

    def expected(self, policy: Policy, temperature: float) -> float:
        """Tokens a step, with what serving has taught."""
        return 1 + self.acceptance_scale * (forecast_tau(self.forecast, policy, temperature) - 1)

    def update(self, policy: Policy, temperature: float, accepted: Sequence[int]) -> None:
        """Hear what every request of a step accepted, bonus included."""
        promised = forecast_tau(self.forecast, policy, temperature) - 1
        if promised > 0:
            observed = (sum(accepted) / len(accepted) - 1) / promised
            self.acceptance_scale += (observed - self.acceptance_scale) * len(accepted) / (_LEARNS + len(accepted))
        else:  # nothing was drafted: the texts may have changed, so speculation gets another chance in time
            self.acceptance_scale += (1 - self.acceptance_scale) / _FORGETS


def forecast_tau(forecast: Forecast, policy: Policy, temperature: float) -> float:
    """Tokens a step of a policy; between T = 0 and T = 1 a straight line."""
    if policy.name not in forecast:
        return 1.0
    cold, hot = (curve[min(policy.num_nodes, len(curve)) - 1] for curve in forecast[policy.name])
    warm = min(max(temperature, 0.0), 1.0)
    return cold + warm * (hot - cold)


def profile_step_cost(
    runner: ModelRunner,
    policies: Sequence[Policy],
    forecast: Forecast,
    limits: Limits,
    advance: Callable[[int], None] = lambda buckets: None,
    calibration: Calibration | None = None,
) -> dict[tuple[Policy, int], float]:
    """Median seconds of a step of every policy that may pay, by batch bucket 1, 2, 4, … up to the limits' batch.

    A policy whose smaller trees cost too much already is not tried: `policies` stand in order of their rows. The
    executor's pools must be allocated; page 0 alone is written.
    """
    (off,) = (policy for policy in policies if isinstance(policy, Off))
    found: dict[tuple[Policy, int], float] = {}
    for bucket in buckets(limits.max_batch):
        batch = _dummy_batch(runner, limits, bucket)
        plain = found[off, bucket] = _time(runner, off, batch, calibration)
        pruned: set[str] = set()
        for policy in policies:
            if policy is off or policy.name in pruned:
                continue
            seconds = found[policy, bucket] = _time(runner, policy, batch, calibration)
            best = max(max(curve) for curve in forecast.get(policy.name, ([1.0],)))
            if seconds > best * plain:
                pruned.add(policy.name)
        advance(1)
    return found


def _time(runner: ModelRunner, policy: Policy, batch: Batch, calibration: Calibration | None) -> float:
    """Median seconds of a decode step as the engine serves it; the first run is a warm-up."""
    taken = []
    for _ in range(1 + _REPEATS):
        _wait(runner)
        start = time.perf_counter()
        runner.sync_drafters(policy.required_drafters)
        decode_step(runner, policy, batch, calibration)
        _wait(runner)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def _dummy_batch(runner: ModelRunner, limits: Limits, size: int) -> Batch:
    """Greedy requests of a usual length."""
    pages = limits.pages_for(min(_CONTEXT, limits.max_context)) + 1
    return Batch.dummy(size, pages, (pages - 1) * limits.page_size, runner.vocab_size, runner.device)


def _wait(runner: ModelRunner) -> None:
    if runner.device.startswith("cuda"):
        torch.cuda.synchronize()
