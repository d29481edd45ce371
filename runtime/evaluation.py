"""One method on a list of prompts, with its metrics: `d2sd train` evaluates by it, and `d2sd bench` extends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from d2sd.policies import DrafterName
from d2sd.runtime.stats import SequenceStats, calibration_error, mean_tau

#: `d2sd.runtime.stats.Bin`, checked.
CheckedBin = tuple[NonNegativeInt, NonNegativeFloat, NonNegativeInt]


class AcceptedLengths(BaseModel):
    """Accepted tokens of every decode step of one prompt."""

    model_config = ConfigDict(frozen=True)

    id: str
    accepted: Annotated[list[PositiveInt], Field(min_length=1)]  # tokens committed by each step, bonus included

    @property
    def stats(self) -> SequenceStats:
        return SequenceStats(Counter(self.accepted))


class Evaluation(BaseModel):
    """One method on a list of prompts."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    method: str
    rows: PositiveInt  # tree nodes verified by the target in a step
    requests: Annotated[Sequence[AcceptedLengths], Field(min_length=1)]
    #: Reliability bins of each drafter's confidence, 0 - 0.1, …, 0.9 - 1, given that all earlier tokens of the path
    #: were accepted.
    calibration: dict[DrafterName, Annotated[list[CheckedBin], Field(min_length=10, max_length=10)]]

    @property
    def tau(self) -> float:
        """Mean over responses of each response's tokens per step, bonus included (the papers' definition)."""
        return mean_tau(request.stats for request in self.requests)

    @property
    def total(self) -> SequenceStats:
        """The steps of all prompts."""
        return SequenceStats.merged(request.stats for request in self.requests)

    @property
    def joint_acceptance(self) -> list[float]:
        """Share of request-steps that accepted at least k drafted tokens, for k = 1, 2, … up to the maximum."""
        return self.total.joint_acceptance()

    @property
    def conditional_acceptance(self) -> list[float]:
        """Share of the request-steps with at least k - 1 accepted drafts that accepted at least k."""
        return self.total.conditional_acceptance()

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
