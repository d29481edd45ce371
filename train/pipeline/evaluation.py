"""The result of one method on held-out prompts: a cell of a drafter's log, and its metrics.

The keys are those of a cell in `d2sd bench`'s result.json, so the same readers and metrics apply to both.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from d2sd.policies import DrafterName
from d2sd.runtime.stats import SequenceStats, calibration_error, mean_tau


class AcceptedLengths(BaseModel):
    """Accepted tokens of every decode step of one prompt."""

    model_config = ConfigDict(frozen=True)

    id: str
    accepted: Annotated[list[PositiveInt], Field(min_length=1)]  # tokens committed by each step, bonus included


class Evaluation(BaseModel):
    """One method on the held-out prompts, at T = 0."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    method: str
    rows: PositiveInt  # tree nodes verified by the target in a step
    requests: Annotated[list[AcceptedLengths], Field(min_length=1)]
    #: Reliability bins of each drafter's confidence (`d2sd.runtime.stats.Bin`), uncalibrated.
    calibration: dict[
        DrafterName,
        Annotated[list[tuple[NonNegativeInt, NonNegativeFloat, NonNegativeInt]], Field(min_length=10, max_length=10)],
    ]

    @property
    def tau(self) -> float:
        """Tokens per step, bonus included: mean over prompts."""
        return mean_tau(self._stats())

    @property
    def joint_acceptance(self) -> list[float]:
        """Share of steps that accepted at least k drafted tokens, for k = 1, 2, …"""
        return SequenceStats.merged(self._stats()).joint_acceptance()

    @property
    def conditional_acceptance(self) -> list[float]:
        """Share of the steps with at least k - 1 accepted drafts that accepted at least k."""
        return SequenceStats.merged(self._stats()).conditional_acceptance()

    @property
    def calibration_errors(self) -> dict[DrafterName, float]:
        """Expected calibration error of each drafter that drafted tokens."""
        errors = {drafter: calibration_error(bins) for drafter, bins in self.calibration.items()}
        return {drafter: error for drafter, error in errors.items() if error is not None}

    def figures(self) -> dict[str, Any]:
        """The rounded figures of evaluation.json; equal drafters give equal figures."""
        return {
            "rows": self.rows,
            "tau": round(self.tau, 4),
            "joint acceptance": [round(share, 4) for share in self.joint_acceptance],
            "conditional acceptance": [round(share, 4) for share in self.conditional_acceptance],
            "calibration error": {name: round(error, 4) for name, error in self.calibration_errors.items()},
        }

    def _stats(self) -> list[SequenceStats]:
        return [SequenceStats(Counter(request.accepted)) for request in self.requests]
