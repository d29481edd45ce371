"""How long the decode steps of each policy take on this machine, measured when the engine is made.

On a CPU it takes `LIMIT` seconds at most, whatever else runs there: the smallest batches come first, and the times of
steps that are left out are read from the line through those of smaller batches until serving shows them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from types import MappingProxyType

import numpy as np
import torch

from d2sd.policies import DrafterRole, with_branches
from d2sd.runtime.acceptance import Array
from d2sd.runtime.batch import Batch
from d2sd.runtime.cuda_graphs.steps import DecodeSteps
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits, buckets, power_of_two
from d2sd.runtime.speculation.policy import Off, Policy

#: Tokens a step at T = 0 and at T = 1, entry n for n + 1 nodes, by policy name, or by `with_branches` of one with fewer
#: branches than the recipe's.
Forecast = Mapping[str, tuple[Sequence[float], Sequence[float]]]
#: Seconds by policy and batch bucket.
Seconds = Mapping[tuple[Policy, int], float]

#: Seconds of measuring on a CPU; a step that has begun is finished. On a GPU each step is compiled and captured
#: besides, which must be done once whether it is timed or not.
LIMIT = 10.0
#: The part of it for steps; the rest is for what context adds to them.
_STEPS = 0.7
_REPEATS, _FEW_REPEATS = 5, 2
#: On a CPU the steps of a batch are timed in so many turns, with few runs in each: other work that comes for part of
#: a second slows one turn, and of plain decoding, with which all is compared, that would mislead every choice.
_TURNS = 2
#: On a GPU an engine launches a step while the one before it runs: so many are timed together, without a wait between.
_IN_A_ROW, _ROWS = 4, 2
#: Context tokens of the requests that are timed. On a GPU, which reads it once for all rows, a longer context adds the
#: same time to a step of every policy; a CPU computes each row's attention, so that it is measured for every policy.
CONTEXT, _LONG_CONTEXT = 64, 512
#: Rows of pending context that are timed.
_PENDING = 128


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured seconds of decode steps."""

    seconds: Seconds  # of a step; pruned policies are missing
    context: Seconds  # of a token more of context
    pending: Mapping[DrafterRole, float]  # of a row of pending context
    guessed: frozenset[tuple[Policy, int]] = frozenset()  # of `seconds`, those that there was no time to measure

    @staticmethod
    def of(seconds: Seconds) -> StepTimes:
        """Steps alone: context and pending rows cost nothing."""
        return StepTimes(seconds, {}, {})

    def step(self, policy: Policy, bucket: int, context: float) -> float | None:
        """Seconds of a step of `bucket` requests with `context` tokens each; None if it was not measured."""
        seconds = self.seconds.get((policy, bucket))
        if seconds is None:
            return None
        return seconds + self.context.get((policy, bucket), 0.0) * max(0.0, context - CONTEXT)

    def of_bucket(self, policies: Sequence[Policy], bucket: int) -> tuple[Array, Array]:
        """Seconds [P] of a step of each policy, NaN where it was not measured, and of a token more than CONTEXT."""
        steps = [(policy, bucket) for policy in policies]
        seconds = np.array([self.seconds.get(step, np.nan) for step in steps])
        return seconds, np.array([self.context.get(step, 0.0) for step in steps])


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

    def __call__(self, rows: Array) -> Array:
        """Seconds of so many rows each; beyond the last point along the last line."""
        counts, seconds = np.array(self.points).T
        place = np.clip(np.searchsorted(counts, rows, "right"), 1, len(counts) - 1)
        slope = (seconds[place] - seconds[place - 1]) / (counts[place] - counts[place - 1])
        found: Array = seconds[place - 1] + slope * (rows - counts[place - 1])
        return found


@dataclass(frozen=True, slots=True)
class StepTimer:
    """Times decode steps as an engine serves them, with its calibration and its CUDA graphs.

    The runner's pools must be allocated; only page 0 is written.
    """

    runner: ModelRunner
    limits: Limits
    steps: DecodeSteps
    clock: Callable[[], float] = time.perf_counter
    end: float = inf  # seconds of the clock, after which no run begins

    @property
    def late(self) -> bool:
        return self.clock() >= self.end

    def batch(self, size: int, context: int) -> Batch:
        """Greedy requests with `context` tokens of context, or fewer if the limits are lower.

        Their pages differ, as those of real requests: one page for all would stay in a GPU's cache.
        """
        runner, limits = self.runner, self.limits
        pages = limits.pages_for(min(context, limits.max_context))
        most = limits.pages_for(limits.max_context + runner.block_size)
        where = runner.scratch(size, min(pages + 1, most), pages * limits.page_size)
        page_ids = torch.arange(where.pages.numel()).view(where.pages.shape)
        where = where.with_tables(page_ids % count for count in runner.page_counts)
        return Batch.dummy(where, runner.vocab_size, runner.device)

    def seconds(self, policy: Policy, batch: Batch, repeats: int) -> float | None:
        """Least seconds of a step: other work on the machine only ever adds to it. The first run is a warm-up.

        None if `end` passes before the last one: a few runs show less.
        """
        durations, together = [], 1
        if self.runner.capture is not None:
            repeats, together = min(repeats, _ROWS), _IN_A_ROW
        for _ in range(1 + repeats):
            if self.late:
                return None
            _wait(self.runner)
            start = self.clock()
            for _ in range(together):
                self.steps.run(policy, batch, graph=self.steps.graph_for(policy, batch))
            _wait(self.runner)
            durations.append((self.clock() - start) / together)
        return min(durations[1:])


def measure_step_times(
    runner: ModelRunner,
    policies: Sequence[Policy],
    forecast: Forecast,
    limits: Limits,
    advance: Callable[[int], None] = lambda buckets: None,
    steps: DecodeSteps | None = None,
    known: StepTimes | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes:
    """The times of this machine; see `time_steps`. What is `known` is not measured again.

    `steps` are those of the engine that will serve them; the default is a new one.
    """
    begun, limit, known = clock(), inf if runner.device.startswith("cuda") else LIMIT, known or StepTimes.of({})
    steps = steps or DecodeSteps(runner, limits)
    timer = StepTimer(runner, limits, steps, clock, begun + _STEPS * limit)
    pending, refused, measured = time_pending(runner), steps.refused, dict(known.seconds)
    seconds = time_steps(timer, policies, forecast, measured, advance)
    if steps.refused and not refused:  # some of them were captured, and no step is any more
        measured = {}
        seconds = time_steps(StepTimer(runner, limits, steps), policies, forecast, measured)
    late, timer = timer.late, replace(timer, end=begun + limit)
    context = time_context(timer, measured if late else seconds, known.context)
    if not late and not timer.late:
        return StepTimes(seconds, context, pending)
    guessed = frozenset(seconds.keys() - (measured.keys() & context.keys()))
    most, added = max(((p.num_nodes * size, more) for (p, size), more in context.items()), default=(1, 0.0))
    likely = {(policy, size): added * policy.num_nodes * size / most for policy, size in guessed}  # each row reads it
    return StepTimes(seconds, likely | context, pending, guessed)


def time_steps(
    timer: StepTimer,
    policies: Sequence[Policy],
    forecast: Forecast,
    measured: dict[tuple[Policy, int], float],
    advance: Callable[[int], None] = lambda buckets: None,
) -> dict[tuple[Policy, int], float]:
    """Seconds of a step of every policy that may pay, by batch bucket 1, 2, 3, 4, 6, … up to the limits' batch.

    `policies` are sorted by their nodes: once a tree costs more than its best forecast gains, larger trees of the same
    policy with as many branches are skipped. What is in `measured` is taken as it is, and what is measured is added.
    After the timer's end nothing but plain decoding of the first batch is: then other batch sizes tell.
    """
    (off,) = (policy for policy in policies if isinstance(policy, Off))
    times: dict[tuple[Policy, int], float] = {}
    sizes, endless = buckets(timer.limits.max_batch), timer.end == inf
    if not endless:  # the powers of two first: others are interpolated between them if there is no time
        sizes.sort(key=lambda size: (size != power_of_two(size), size))
    for bucket in reversed(sizes) if endless else sizes:  # graphs of smaller batches fit in the memory of larger ones
        batch = timer.batch(bucket, CONTEXT)
        pruned, fresh = list[Policy](), list[Policy]()
        for policy in (off, *(policy for policy in policies if policy is not off)):
            if any(one.name == policy.name and one.num_branches <= policy.num_branches for one in pruned):
                continue
            if (policy, bucket) not in measured:
                own = timer if measured else replace(timer, end=inf)
                found = own.seconds(policy, batch, _REPEATS if endless else _FEW_REPEATS)
                measured |= {} if found is None else {(policy, bucket): found}
                fresh += [] if found is None else [policy]
            seconds = measured.get((policy, bucket)) or _guess(measured, policy, bucket)
            if seconds is not None:
                times[policy, bucket] = seconds
                if seconds > _most(policy, forecast, timer.runner.block_size) * times[off, bucket]:
                    pruned.append(policy)
        for policy in [] if endless else fresh * (_TURNS - 1):
            found = timer.seconds(policy, batch, _FEW_REPEATS)
            measured[policy, bucket] = times[policy, bucket] = min(found or inf, measured[policy, bucket])
        advance(1)
    return times


def _guess(measured: Seconds, policy: Policy, bucket: int) -> float | None:
    """Seconds on the line through the measured batch sizes of a policy; from one alone they grow with the batch."""
    points = sorted((size, seconds) for (one, size), seconds in measured.items() if one == policy)
    if not points:
        return None
    line = RowTimes(((0, 0.0), *points) if len(points) == 1 else tuple(points))
    return max(float(line(np.array(bucket))), min(seconds for _, seconds in points))


def _most(policy: Policy, forecast: Forecast, block_size: int) -> float:
    """Tokens a step that the policy's trees may make: a block where a text repeats itself, else by its forecast."""
    if policy.lookup:
        return min(block_size, policy.num_nodes)
    return max(max(curve) for curve in curves_of(forecast, policy) or ([1.0],))


def curves_of(forecast: Forecast, policy: Policy, copies: str = "") -> tuple[Sequence[float], Sequence[float]] | None:
    """The curves of a policy, with LOOKUP those with copies: of its number of branches, if they are known."""
    own = forecast.get(with_branches(policy.name, policy.num_branches) + copies)
    return own or forecast.get(policy.name + copies)


def time_context(
    timer: StepTimer, seconds: Seconds, known: Seconds = MappingProxyType({})
) -> dict[tuple[Policy, int], float]:
    """Seconds that a token more of context adds to a step, by policy and batch bucket; `seconds` of `time_steps`.

    After the timer's end nothing is begun, and some steps are left out. What is `known` is taken over.
    """
    length = min(_LONG_CONTEXT, timer.limits.max_context)
    if length <= CONTEXT:
        return {}
    found = dict(known)
    for policy, size in seconds:
        measured = next(one for one, _ in seconds if isinstance(one, Off)) if timer.runner.static_shapes else policy
        if (measured, size) not in found and not timer.late:
            longer = timer.seconds(measured, timer.batch(size, length), _FEW_REPEATS)
            if longer is not None:
                found[measured, size] = max(0.0, longer - seconds[measured, size]) / (length - CONTEXT)
        if (measured, size) in found:
            found[policy, size] = found[measured, size]
    return found


@torch.inference_mode()
def time_pending(runner: ModelRunner) -> dict[DrafterRole, float]:
    """Seconds of a row of pending context, by drafter; nothing is written."""
    row_seconds = {}
    for role in runner.context.pending_rows:
        durations, model = list[float](), runner.drafters[role]
        width = len(model.config.target_layer_ids) * model.config.body.hidden_size
        features = runner.target.embed_tokens.weight.new_zeros(1, _PENDING, width)
        positions = torch.arange(_PENDING, device=runner.device)[None]
        for _ in range(1 + _REPEATS):
            _wait(runner)
            start = time.perf_counter()
            model.context_keys_values(features, positions)
            _wait(runner)
            durations.append(time.perf_counter() - start)
        row_seconds[role] = min(durations[1:]) / _PENDING
    return row_seconds


def _wait(runner: ModelRunner) -> None:
    if runner.device.startswith("cuda"):
        torch.cuda.synchronize(runner.device)
