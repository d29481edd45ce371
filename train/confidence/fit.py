"""Fit a confidence calibration to the steps of the drafters' trees, at T = 0 and T = 1.

Predicted acceptance is fitted to the observed one by Platt scaling: one logistic regression per drafter, distance and
kind of candidate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from d2sd.bundle.load import Bundle
from d2sd.bundle.serving import can_run, chat_request, make_engine
from d2sd.calibration import CalibrationFile, CopyTable
from d2sd.convert.kinds import KINDS
from d2sd.errors import D2SDError
from d2sd.policies import FACTS, LOOKUP, DrafterName, DrafterRole, FirstPass, PolicyName
from d2sd.progress import bar
from d2sd.recipe import Recipe
from d2sd.runtime.observe import CopyOutcome, NodeOutcome, StepObservation, run_observed
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.calibration import Calibration, logit
from d2sd.runtime.stats import calibration_error, reliability_bins
from d2sd.train.confidence.copies import fit_copies

#: Weight, in observations, of the prior a = 1, b = 0: it regularises distances that are rarely reached.
PRIOR = 4.0
_MIN_SLOPE = 0.05  # positive, so that calibration keeps the order of confidences
_STEPS = 200


def fit(greedy: Iterable[NodeOutcome], sampled: Iterable[NodeOutcome], slots: int, drafters: int = 2) -> Calibration:
    """Calibration of blocks with `slots` drafts, from node outcomes at T = 0 and at T = 1; `drafters` is its D."""
    slope, offset = torch.ones(2, drafters, slots, 2), torch.zeros(2, drafters, slots, 2)
    for warm, observed in enumerate((greedy, sampled)):
        groups: dict[tuple[int, int, int], list[tuple[float, bool]]] = {}
        for outcome in observed:
            key = outcome.drafter, outcome.distance, int(outcome.sibling)
            groups.setdefault(key, []).append((outcome.logprob, outcome.accepted))
        for key, pairs in groups.items():
            x = logit(torch.tensor([logprob for logprob, _ in pairs], dtype=torch.float64))
            y = torch.tensor([accepted for _, accepted in pairs], dtype=torch.float64)
            drafter, distance, kind = key
            index = warm, drafter, distance, kind
            slope[index], offset[index] = logistic(x, y)
    return Calibration(slope, offset)


def logistic(x: Tensor, y: Tensor) -> tuple[float, float]:
    """a and b that maximise the likelihood of y under sigmoid(a·x + b), with the prior and a >= _MIN_SLOPE."""
    free = _fitted(x, y, torch.tensor([1.0, 0.0], dtype=torch.float64), None)
    slope, offset = free if free[0] >= _MIN_SLOPE else _fitted(x, y, torch.zeros(1, dtype=torch.float64), _MIN_SLOPE)
    return slope, offset


def _fitted(x: Tensor, y: Tensor, prior: Tensor, slope: float | None) -> tuple[float, float]:
    """Solve the convex problem in (a, b), or in b alone at a given slope."""
    weights = prior.clone().requires_grad_()
    search = torch.optim.LBFGS(
        [weights], max_iter=_STEPS, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        search.zero_grad()
        odds = x * (weights[0] if slope is None else slope) + weights[-1]
        misfit = binary_cross_entropy_with_logits(odds, y, reduction="sum")
        total: Tensor = (misfit + PRIOR / 2 * ((weights - prior) ** 2).sum()) / (len(x) + PRIOR)
        total.backward()  # type: ignore[no-untyped-call]
        return total

    search.step(loss)  # type: ignore[no-untyped-call]
    solution = weights.tolist()
    return solution[0] if slope is None else slope, solution[-1]


def calibrated(judged: Iterable[NodeOutcome], calibration: Calibration, warm: int) -> list[NodeOutcome]:
    """The nodes with calibrated probabilities; `warm` is 0 for T = 0, 1 for T = 1."""
    outcomes = []
    for outcome in judged:
        key = warm, outcome.drafter, outcome.distance, int(outcome.sibling)
        odds = calibration.slope[key] * logit(torch.tensor(outcome.logprob)) + calibration.offset[key]
        outcomes.append(outcome._replace(logprob=float(logsigmoid(odds))))
    return outcomes


def drafter_error(outcomes: Iterable[NodeOutcome], drafter: int) -> float:
    """Expected calibration error of one drafter's nodes (`DrafterRole`); 0 without any."""
    bins = reliability_bins((outcome.prob, outcome.accepted) for outcome in outcomes if outcome.drafter == drafter)
    return calibration_error(bins) or 0.0


#: Nodes of the observed trees; smaller trees are their prefixes.
_NODE_BUDGET = 64
_REGIMES: tuple[tuple[Literal["0", "1"], float], ...] = (("0", 0.0), ("1", 1.0))


def refuse_uncalibrated(recipe: Recipe, drafters: Collection[DrafterRole], where: Path) -> None:
    """Raise D2SDError for a bundle that cannot be calibrated, by its recipe and drafters."""
    if not drafters:
        raise D2SDError("The bundle has no drafter to calibrate.", where=where)
    if recipe.precision == "fp16":
        raise D2SDError(
            "A calibration is tied to the drafters' weights, and fp16 rounds small ones.",
            where=f"{where}: precision",
            found="fp16",
            expected="fp32 or bf16",
            fix="build with --set precision=bf16 to calibrate",
        )
    if recipe.fp8 is not None and recipe.fp8.drafters:
        raise D2SDError(
            "A calibration is tied to the drafters' weights, and FP8 has rounded them.",
            where=f"{where}: fp8.drafters",
            fix="calibrate a bundle without fp8; the calibration serves both",
        )


def calibrate(bundle: Bundle, texts: Sequence[str], max_new_tokens: int, device: str = "cpu") -> CalibrationFile:
    """The calibration of a bundle by its answers to `texts`, of up to `max_new_tokens` tokens."""
    weights = fingerprints(bundle)
    requests = [chat_request(bundle, text, SamplingParams(), max_new_tokens) for text in texts]
    return fit_calibration(bundle, weights, requests, device)


def fingerprints(bundle: Bundle) -> dict[DrafterName, str]:
    """Hashes of the weights to which a calibration is tied. Call it before an engine packs them.

    Raises D2SDError for a bundle without a drafter, and for weights that its precision has rounded.
    """
    refuse_uncalibrated(bundle.recipe, bundle.drafters, bundle.path)
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
                    tau[key][policy] = _gain(steps, tree=facts.grows)
            nodes += [node for step in steps for node in step.judged if node.drafter not in roles]
            roles += [role for role in FACTS[watched].drafters if role not in roles]
        outcomes.append(nodes)
    report: dict[str, float] = {"prompts": len(requests), "max_new_tokens": max(r.max_new_tokens for r in requests)}
    slots = bundle.recipe.tree.block_size - 1
    fitted = fit(outcomes[0], outcomes[1], slots, drafters=1 + max(DrafterRole.SECOND, *bundle.drafters))
    report |= _errors(outcomes, fitted, roles, bundle.drafters)
    file = CalibrationFile(
        drafters=dict(weights),
        block_size=slots + 1,
        tau=tau,
        report=report,
        slope=fitted.slope.double().round(decimals=4).tolist(),
        offset=fitted.offset.double().round(decimals=4).tolist(),
    )
    return with_copies(bundle, file, requests, device)


def with_copies(bundle: Bundle, file: CalibrationFile, requests: Sequence[Request], device: str) -> CalibrationFile:
    """The calibration with the odds of copies, and the tokens per step of trees in which they compete."""
    calibrated, tau = replace(bundle, calibration=file), {key: dict(curves) for key, curves in file.tau.items()}
    odds: dict[Literal["0", "1"], CopyTable] = {}
    for key, temperature in _REGIMES:
        outcomes: list[CopyOutcome] = []
        for policy in [name for name in FACTS if name in file.tau[key] and FACTS[name].copies]:
            steps = watch(calibrated, policy, requests, temperature, device, lookup=True)
            tau[key][policy + LOOKUP] = _gain(steps, tree=True)
            outcomes += [outcome for step in steps for outcome in step.copied]
        odds[key] = CopyTable(**fit_copies(outcomes, file.block_size - 1)._asdict())
    return file.model_copy(update={"tau": tau, "copies": odds})


def watch(
    bundle: Bundle,
    policy: PolicyName,
    requests: Sequence[Request],
    temperature: float,
    device: str,
    *,
    lookup: bool = False,
) -> list[StepObservation]:
    """Run all requests and observe every step; calibrated trees if copies compete, else as the drafters score them."""
    scored = partial(make_engine, bundle, policy=policy, row_budget=_NODE_BUDGET, device=device)
    engine = scored(calibrated=lookup, lookup=lookup)
    engine.record_trace = True
    for seed, request in enumerate(requests):
        engine.submit(replace(request, sampling=SamplingParams(temperature, seed=seed)))
    with bar(f"{engine.policy} at T = {temperature:g}", len(requests)) as advance:
        return list(run_observed(engine, advance))


def _errors(
    outcomes: list[list[NodeOutcome]], fitted: Calibration, roles: list[DrafterRole], drafters: Collection[DrafterRole]
) -> dict[str, float]:
    errors = {}
    for warm, nodes in enumerate(outcomes):
        for drafter in roles:
            made = drafter.key if drafter in drafters else f"{drafter.key} pass"  # that the first made
            name = f"calibration error of {made} at T = {warm}"
            errors[f"{name}, before"] = round(drafter_error(nodes, drafter), 4)
            errors[f"{name}, after"] = round(drafter_error(calibrated(nodes, fitted, warm), drafter), 4)
    return errors


def _gain(observations: list[StepObservation], *, tree: bool) -> list[float]:
    """Mean tokens per step with 1, 2, … rows, from the row indices of every step's accepted nodes, without the root."""
    accepted = [step.path if tree else list(range(1, step.chain + 1)) for step in observations]
    return [
        round(1 + sum(sum(index < rows for index in step) for step in accepted) / len(accepted), 4)
        for rows in range(1, _NODE_BUDGET + 1)
    ]
