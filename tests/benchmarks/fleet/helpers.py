"""Costs of made-up engines."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.fleet.costs import EngineCosts, PolicyCosts, WorkerModel
from d2sd.runtime.buckets import buckets

PLAIN = [1.0, 0.0, 0.0, 0.0]


def engine_costs(
    step: float = 1.0, max_batch: int = 8, accepted: Sequence[list[float]] = (PLAIN,), prefill: float = 0.0
) -> EngineCosts:
    """Steps of `step` seconds at any batch; `prefill` seconds for a prompt token."""
    sizes = buckets(max_batch)
    policy = PolicyCosts(seconds=dict.fromkeys(sizes, (step, 0.0)), accepted=list(accepted))
    calls = [(1, prefill), (128, 128 * prefill)]
    return EngineCosts(served=dict.fromkeys(sizes, "one"), policies={"one": policy}, prefill=calls)


def model(
    step: float = 1.0, max_batch: int = 8, prefill: float = 0.0, accepted: Sequence[list[float]] = (PLAIN,)
) -> WorkerModel:
    return WorkerModel(engine_costs(step, max_batch, accepted, prefill))
