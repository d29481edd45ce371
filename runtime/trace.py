"""The record of one decode step, for visualisation, benchmarks and calibration."""

from __future__ import annotations

from dataclasses import dataclass

from d2sd.plugins.trees import Accepted, Branches, Draft, Tree
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.speculation.policy import Policy


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The tensors of one decode step, for callers that draw or count them; see `Engine.record_trace`."""

    sequences: tuple[Sequence, ...]
    policy: Policy
    first: Draft | None
    branches: Branches | None
    tree: Tree
    accepted: Accepted
