"""Fit a confidence calibration to the steps of the drafters' trees, at T = 0 and T = 1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from d2sd.bundle.load import Bundle
from d2sd.bundle.serving import can_run, make_engine
from d2sd.calibration import CalibrationFile
from d2sd.convert.kinds import KINDS
from d2sd.errors import D2SDError
from d2sd.policies import FACTS, DrafterName, DrafterRole, FirstPass, PolicyName
from d2sd.progress import bar
from d2sd.runtime.observe import NodeOutcome, StepObservation, run_observed
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.train.confidence.platt import calibrated, drafter_error, fit

#: Nodes of the observed trees; smaller trees are their prefixes.
_NODE_BUDGET = 64
_REGIMES: tuple[tuple[Literal["0", "1"], float], ...] = (("0", 0.0), ("1", 1.0))


def fingerprints(bundle: Bundle) -> dict[DrafterName, str]:
    """Hashes of the weights to which a calibration is tied. Call it before an engine packs them.

    Raises D2SDError for a bundle without a drafter, and for weights that its precision has rounded.
    """
    if not bundle.drafters:
        raise D2SDError("The bundle has no drafter to calibrate.", where=bundle.path)
    if bundle.recipe.precision == "fp16":
        raise D2SDError(
            "A calibration is tied to the drafters' weights, and fp16 rounds small ones.",
            where=f"{bundle.path}: precision", found="fp16",
            expected="fp32 or bf16", fix="build with --set precision=bf16 to calibrate",
        )  # fmt: skip
    if bundle.recipe.fp8 is not None and bundle.recipe.fp8.drafters:
        raise D2SDError(
            "A calibration is tied to the drafters' weights, and FP8 has rounded them.",
            where=f"{bundle.path}: fp8.drafters", fix="calibrate a bundle without fp8; the calibration serves both",
        )  # fmt: skip
    return {role.key: KINDS[role].fingerprint(drafter) for role, drafter in bundle.drafters.items()}


def fit_calibration(
    bundle: Bundle, weights: Mapping[DrafterName, str], requests: Sequence[Request], device: str = "cpu"
) -> CalibrationFile:
    """Run all requests with the bundle's drafters, fit predicted to observed acceptance, and measure tokens per step by
    number of rows.

    The requests' sampling is replaced: at T = 1 the seed is the request's index.
    """
    outcomes: list[list[NodeOutcome]] = []
    tau: dict[Literal["0", "1"], dict[str, list[float]]] = {}
    roles: list[DrafterRole] = []
    for key, temperature in _REGIMES:
        tau[key], nodes, roles = {}, [], []
        for watched in dict.fromkeys(facts.forecast_by for facts in FACTS.values()):
            if watched is None or not can_run(bundle.draft_configs, watched):
                continue
            steps = watch(bundle, watched, requests, temperature, device)
            for policy, facts in FACTS.items():
                if facts.forecast_by == watched and facts.first_pass is not FirstPass.CARRIED:
                    tau[key][policy] = _tree_gain(steps) if facts.grows else _chain_gain(steps)
            nodes += [node for node in _all(steps) if node.drafter not in roles]
            roles += [role for role in FACTS[watched].drafters if role not in roles]
        outcomes.append(nodes)
    report: dict[str, float] = {"prompts": len(requests), "max_new_tokens": max(r.max_new_tokens for r in requests)}
    slots = next(iter(bundle.drafters.values())).config.block_size - 1
    fitted = fit(outcomes[0], outcomes[1], slots, drafters=1 + max(DrafterRole.SECOND, *bundle.drafters))
    report |= _errors(outcomes, fitted, roles)
    return CalibrationFile(
        drafters=dict(weights), block_size=slots + 1, tau=tau, report=report,
        slope=fitted.slope.double().round(decimals=4).tolist(),
        offset=fitted.offset.double().round(decimals=4).tolist(),
    )  # fmt: skip


def watch(
    bundle: Bundle, policy: PolicyName, requests: Sequence[Request], temperature: float, device: str
) -> list[StepObservation]:
    """Run all requests and observe every step."""
    engine = make_engine(bundle, policy=policy, row_budget=_NODE_BUDGET, calibrated=False, device=device)
    engine.record_trace = True
    for seed, request in enumerate(requests):
        engine.submit(replace(request, sampling=SamplingParams(temperature, seed=seed)))
    with bar(f"{policy} at T = {temperature:g}", len(requests)) as advance:
        return list(run_observed(engine, advance))


def _errors(outcomes: list[list[NodeOutcome]], fitted: Calibration, roles: list[DrafterRole]) -> dict[str, float]:
    found = {}
    for warm, nodes in enumerate(outcomes):
        for drafter in roles:
            name = f"calibration error of {drafter.name.lower()} at T = {warm}"
            found[f"{name}, before"] = round(drafter_error(nodes, drafter), 4)
            found[f"{name}, after"] = round(drafter_error(calibrated(nodes, fitted, warm), drafter), 4)
    return found


def _all(observations: Iterable[StepObservation]) -> list[NodeOutcome]:
    return [node for one in observations for node in one.judged]


def _gain(accepted: list[list[int]]) -> list[float]:
    """Mean tokens per step with 1, 2, … rows, from the row indices of every step's accepted nodes, without the root."""
    return [
        round(1 + sum(sum(index < rows for index in step) for step in accepted) / len(accepted), 4)
        for rows in range(1, _NODE_BUDGET + 1)
    ]


def _chain_gain(observations: list[StepObservation]) -> list[float]:
    return _gain([list(range(1, one.chain + 1)) for one in observations])


def _tree_gain(observations: list[StepObservation]) -> list[float]:
    return _gain([[node.node for node in one.judged if node.accepted] for one in observations])
