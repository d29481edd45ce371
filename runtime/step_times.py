"""How long the decode steps of each policy take on this machine, measured when the engine is made."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

import torch

from d2sd.policies import DrafterRole
from d2sd.runtime.batch import Batch
from d2sd.runtime.cuda_graphs.steps import DecodeSteps
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits, buckets
from d2sd.runtime.speculation.policy import Off, Policy

#: Tokens a step at T = 0 and at T = 1 by policy name; entry n is for n + 1 nodes.
Forecast = Mapping[str, tuple[Sequence[float], Sequence[float]]]

_REPEATS, _FEW_REPEATS = 5, 2
#: Context tokens of the requests that are timed. On a GPU, which reads it once for all rows, a longer context adds the
#: same time to a step of every policy; a CPU computes each row's attention, so that it is measured for every policy.
_CONTEXT, _LONG_CONTEXT = 64, 512
#: Rows of pending context that are timed.
_PENDING = 128


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured seconds of decode steps."""

    seconds: Mapping[tuple[Policy, int], float]  # of a step, by policy and batch bucket; pruned policies are missing
    context: Mapping[tuple[Policy, int], float]  # of a token more of context
    pending: Mapping[DrafterRole, float]  # of a row of pending context

    @staticmethod
    def of(seconds: Mapping[tuple[Policy, int], float]) -> StepTimes:
        """Steps alone: context and pending rows cost nothing."""
        return StepTimes(seconds, {}, {})

    def step(self, policy: Policy, bucket: int, context: float) -> float | None:
        """Seconds of a step of `bucket` requests with `context` tokens each; None if it was not measured."""
        seconds = self.seconds.get((policy, bucket))
        if seconds is None:
            return None
        return seconds + self.context.get((policy, bucket), 0.0) * max(0.0, context - _CONTEXT)

    def catch_up(self, policy: Policy, pending: Mapping[DrafterRole, int]) -> float:
        """Seconds in which the policy's drafters compute their pending context, `pending` rows of each."""
        return sum(pending.get(role, 0) * self.pending.get(role, 0.0) for role in policy.drafters)


@dataclass(frozen=True, slots=True)
class RowTimes:
    """Seconds in which a CPU verifies rows: of measured steps that draft nothing, and between them along a line."""

    points: tuple[tuple[int, float], ...]  # rows, seconds; both ascend

    @staticmethod
    def of(times: StepTimes) -> RowTimes | None:
        """None without the steps of a policy that has rows to leave out and drafts nothing, which is prompt lookup."""
        found: dict[int, float] = {}
        alone = {(policy, size): seconds for (policy, size), seconds in times.seconds.items() if not policy.drafters}
        if all(isinstance(policy, Off) for policy, _ in alone):
            return None
        for (policy, size), seconds in alone.items():
            rows = size * policy.num_nodes
            found[rows] = min(seconds, found.get(rows, seconds))
        counts = sorted(found)
        return RowTimes(tuple(zip(counts, accumulate((found[rows] for rows in counts), max), strict=True)))

    def __call__(self, rows: float) -> float:
        """Seconds of so many rows; beyond the last point along the last line."""
        place = min(max(1, bisect_left(self.points, (rows, inf))), len(self.points) - 1)
        (fewer, least), (more, most) = self.points[place - 1 : place + 1]
        return least + (most - least) * (rows - fewer) / (more - fewer)


def measure_step_times(
    runner: ModelRunner,
    policies: Sequence[Policy],
    forecast: Forecast,
    limits: Limits,
    advance: Callable[[int], None] = lambda buckets: None,
    steps: DecodeSteps | None = None,
) -> StepTimes:
    """The times of this machine; arguments as of `time_steps`."""
    steps = steps or DecodeSteps(runner, limits)
    refused = steps.refused
    seconds = time_steps(runner, policies, forecast, limits, advance, steps)
    if steps.refused and not refused:  # some of them were captured, and no step is any more
        seconds = time_steps(runner, policies, forecast, limits, steps=steps)
    return StepTimes(seconds, time_context(runner, seconds, limits, steps), time_pending(runner))


def time_steps(
    runner: ModelRunner,
    policies: Sequence[Policy],
    forecast: Forecast,
    limits: Limits,
    advance: Callable[[int], None] = lambda buckets: None,
    steps: DecodeSteps | None = None,
    clock: Callable[[], float] = time.perf_counter,
    context: int = _CONTEXT,
) -> dict[tuple[Policy, int], float]:
    """Seconds of a step of every policy that may pay, by batch bucket 1, 2, 4, … up to the limits' batch.

    `policies` are sorted by their nodes: once a tree costs more than its best forecast gains, larger trees of the same
    policy are skipped. The runner's pools must be allocated; only page 0 is written. `steps` are those of the engine
    that will serve them, with its calibration and its CUDA graphs; the default is a new one. `clock` gives seconds;
    `context` is in tokens a request.
    """
    steps = steps or DecodeSteps(runner, limits)
    (off,) = (policy for policy in policies if isinstance(policy, Off))
    times: dict[tuple[Policy, int], float] = {}
    for bucket in reversed(buckets(limits.max_batch)):  # graphs of smaller batches fit in the memory of larger ones
        batch = _dummy_batch(runner, limits, bucket, context)
        plain = times[off, bucket] = _time(runner, off, batch, steps, clock)
        pruned: set[str] = set()
        for policy in policies:
            if policy is off or policy.name in pruned:
                continue
            seconds = times[policy, bucket] = _time(runner, policy, batch, steps, clock)
            if seconds > _most(policy, forecast, runner.block_size) * plain:
                pruned.add(policy.name)
        advance(1)
    return times


def _most(policy: Policy, forecast: Forecast, block_size: int) -> float:
    """Tokens a step that the policy's trees may make: a block where a text repeats itself, else by its forecast."""
    if policy.lookup:
        return min(block_size, policy.num_nodes)
    return max(max(curve) for curve in forecast.get(policy.name, ([1.0],)))


def time_context(
    runner: ModelRunner,
    seconds: Mapping[tuple[Policy, int], float],
    limits: Limits,
    steps: DecodeSteps | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[tuple[Policy, int], float]:
    """Seconds that a token more of context adds to a step, by policy and batch bucket; `seconds` of `time_steps`."""
    length = min(_LONG_CONTEXT, limits.max_context)
    if length <= _CONTEXT:
        return {}
    steps = steps or DecodeSteps(runner, limits)
    found: dict[tuple[Policy, int], float] = {}
    for policy, size in seconds:
        measured = next(one for one, _ in seconds if isinstance(one, Off)) if runner.static_shapes else policy
        if (measured, size) not in found:
            longer = _time(runner, measured, _dummy_batch(runner, limits, size, length), steps, clock, _FEW_REPEATS)
            found[measured, size] = max(0.0, longer - seconds[measured, size]) / (length - _CONTEXT)
        found[policy, size] = found[measured, size]
    return found


def time_pending(runner: ModelRunner) -> dict[DrafterRole, float]:
    """Seconds of a row of pending context, by drafter."""
    row_seconds = {}
    for role in runner.context.pending_rows:
        durations = []
        for _ in range(1 + _REPEATS):
            _wait(runner)
            start = time.perf_counter()
            runner.compute_context(role, _PENDING)
            _wait(runner)
            durations.append(time.perf_counter() - start)
        row_seconds[role] = min(durations[1:]) / _PENDING
    return row_seconds


def _time(
    runner: ModelRunner,
    policy: Policy,
    batch: Batch,
    steps: DecodeSteps,
    clock: Callable[[], float],
    repeats: int = _REPEATS,
) -> float:
    """Least seconds of a decode step as the engine serves it: other work on the machine only ever adds to it.

    The first run is a warm-up.
    """
    durations = []
    for _ in range(1 + repeats):
        _wait(runner)
        start = clock()
        steps.run(policy, batch, graph=steps.graph_for(policy, batch))
        _wait(runner)
        durations.append(clock() - start)
    return min(durations[1:])


def _dummy_batch(runner: ModelRunner, limits: Limits, size: int, context: int) -> Batch:
    """Greedy requests with `context` tokens of context, or fewer if the limits are lower.

    Their pages differ, as those of real requests: one page for all would stay in a GPU's cache. Nothing is written.
    """
    pages = limits.pages_for(min(context, limits.max_context))
    most = limits.pages_for(limits.max_context + runner.block_size)
    batch = Batch.dummy(
        size,
        min(pages + 1, most),
        pages * limits.page_size,
        runner.vocab_size,
        runner.device,
        windowed=runner.windowed_pages is not None,
        states=runner.slot_bytes > 0,
    )
    page_ids = torch.arange(batch.page_table.numel(), device=batch.page_table.device).view(batch.page_table.shape)
    windowed = None if runner.windowed_pages is None else page_ids % runner.windowed_pages
    return replace(batch, page_table=page_ids % runner.pool_pages, windowed_table=windowed)


def _wait(runner: ModelRunner) -> None:
    if runner.device.startswith("cuda"):
        torch.cuda.synchronize(runner.device)
