"""The cost model of one worker: seconds of a step by batch bucket, policy and prefill rows, and tokens a step.

A step of the engine is the prefill of some prompt chunks and then one decode step, so its time is the sum. A decode
step costs `empty + context · slope`, where `context` is the mean context of its requests. Prefill costs what its rows
cost, and a little for every row and token of context that it attends to.

`measured` costs come from `benchmarks.fleet.profile`, on one machine, `arithmetic` ones from
`benchmarks.fleet.roofline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from benchmarks.fleet.accepted import lengths_by_draw
from d2sd.errors import D2SDError
from d2sd.io import write_text
from d2sd.runtime.buckets import bucket
from d2sd.schema import read_model

Seconds = Annotated[float, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PolicyCosts(_Part):
    """One tree policy."""

    #: By batch bucket: seconds of a decode step without context, and for every token of the requests' mean context.
    seconds: dict[int, tuple[Seconds, Seconds]]
    #: Distributions of accepted lengths 1 .. γ: one, or one for every prompt that was measured.
    accepted: Annotated[list[list[float]], Field(min_length=1)]


class EngineCosts(_Part):
    """An engine of one policy; `auto` is one that serves several."""

    served: dict[int, str]  # batch bucket -> name in `policies`
    policies: dict[str, PolicyCosts]
    #: (prompt tokens of one prefill, of all requests; seconds), ascending.
    prefill: Annotated[list[tuple[int, Seconds]], Field(min_length=1)]
    prefill_context: Seconds = 0.0  # for every row and token of context before it

    @model_validator(mode="after")
    def _known(self) -> Self:
        for size, name in self.served.items():
            if name not in self.policies or size not in self.policies[name].seconds:
                raise ValueError(f"{name} is served at a batch of {size} and has no costs")
        if len({len(one) for costs in self.policies.values() for one in costs.accepted}) != 1:
            raise ValueError("accepted lengths must have the same number of shares everywhere: the block size")
        return self


class StepCosts(_Part):
    """Engines of a bundle on one device, by policy."""

    d2sd_step_costs: Literal[1] = 1
    kind: Literal["measured", "arithmetic"]
    source: str  # machine and bundle, or GPU and assumptions
    engines: dict[str, EngineCosts]


def load_costs(path: Path) -> StepCosts:
    """Read and validate; raises D2SDError naming file and key."""
    fix = "write it with python -m benchmarks.fleet"
    return read_model(StepCosts, path, error=D2SDError, what="file of step costs", fix=fix)


def save_costs(path: Path, costs: StepCosts) -> None:
    """Write the file atomically."""
    write_text(path, costs.model_dump_json(indent=1) + "\n")


class WorkerModel:
    """The costs of one engine in the form that the simulation asks for, many times a second."""

    def __init__(self, costs: EngineCosts) -> None:
        used = {name: costs.policies[name] for name in costs.served.values()}
        self.profiles = max(len(one.accepted) for one in used.values())
        self.block_size = len(next(iter(used.values())).accepted[0])
        self._decode = {size: used[name].seconds[size] for size, name in costs.served.items()}
        tables = {name: [lengths_by_draw(one) for one in policy.accepted] for name, policy in used.items()}
        self._lengths = {size: tables[name] for size, name in costs.served.items()}
        self._prefill, self._prefill_context = costs.prefill, costs.prefill_context
        self._calls: dict[int, float] = {}

    def decode_seconds(self, count: int, context: int) -> float:
        """Seconds of a decode step of `count` requests with `context` tokens of context together."""
        empty, slope = self._decode[bucket(count)]
        return empty + slope * context / count

    def prefill_seconds(self, rows: int, context: int) -> float:
        """Seconds of a prefill of `rows` prompt tokens that attend to `context` tokens each."""
        if rows not in self._calls:
            known, seconds = zip(*self._prefill, strict=True)
            if rows > known[-1]:  # in proportion to the largest call
                self._calls[rows] = seconds[-1] * rows / known[-1]
            else:
                self._calls[rows] = float(np.interp(rows, known, seconds))
        return self._calls[rows] + self._prefill_context * rows * context

    def lengths(self, count: int) -> Sequence[Sequence[int]]:
        """Accepted length by profile and draw, in a step of `count` requests."""
        return self._lengths[bucket(count)]
