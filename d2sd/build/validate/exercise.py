"""The policies by which a build runs the drafters of a bundle."""

from __future__ import annotations

from collections.abc import Collection

from d2sd.policies import FACTS, DrafterRole, PolicyName

_FORECAST = {name: facts for name, facts in FACTS.items() if facts.forecast_by is not None}


def policy_of(role: DrafterRole) -> PolicyName:
    """The first policy, of those that a calibration forecasts, whose last drafter is this one."""
    return next(name for name, facts in _FORECAST.items() if facts.drafters[-1] is role)


def trees_of(roles: Collection[DrafterRole]) -> list[PolicyName]:
    """The fewest policies that together run these drafters, each with the largest trees of its drafters."""
    runs = {name: set(facts.drafters) for name, facts in _FORECAST.items() if facts.forecast_by == name}
    runs = {name: drafters for name, drafters in runs.items() if drafters <= set(roles)}
    return [name for name, drafters in runs.items() if not any(drafters < others for others in runs.values())]
