"""Fit a confidence calibration to the steps of the drafters' trees, at T = 0 and T = 1.

Predicted acceptance is fitted to the observed one by Platt scaling: one logistic regression per use of a drafter,
distance and kind of candidate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from d2sd.build.pipeline import Fit
from d2sd.bundle.load import Bundle
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import can_run, make_engine, policy_of_tree
from d2sd.calibration import CalibrationFile, CopyTable, UseTable
from d2sd.convert.kinds import KINDS
from d2sd.errors import D2SDError, RecipeError
from d2sd.plugins.lookup import LENGTHS, SUPPORT
from d2sd.policies import FACTS, LOOKUP, DrafterName, DrafterRole, DraftUse, FirstPass, PolicyName, with_branches
from d2sd.progress import bar
from d2sd.prompts import OWN_PROMPTS, last_prompts
from d2sd.recipe import Recipe
from d2sd.runtime.observe import CopyOutcome, NodeOutcome, StepObservation, run_observed
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.calibration import DEFAULT_ODDS, Calibration, CopyOdds, logit
from d2sd.runtime.speculation.policy import AUTO_BRANCHES
from d2sd.runtime.stats import calibration_error, reliability_bins

#: Weight, in observations, of the prior: it regularises distances that are rarely reached.
PRIOR = 4.0
#: That of a use's prior, the fit of the one it is like; of 4, 16 and 64 the best on prompts that were left out.
_LIKE_PRIOR = 16.0
#: That of the odds of copies, for every entry.
_COPY_PRIOR = 1.0
_IDENTITY = 1.0, 0.0
_MIN_SLOPE = 0.05  # positive, so that calibration keeps the order of confidences
_STEPS = 200


def fit(greedy: Iterable[NodeOutcome], sampled: Iterable[NodeOutcome], slots: int) -> Calibration:
    """Calibration of blocks with `slots` drafts, from node outcomes at T = 0 and at T = 1.

    The prior of a use is the fit of the one it is like, and the identity of those that are like no other.
    """
    slope, offset = torch.ones(2, len(DraftUse), slots, 2), torch.zeros(2, len(DraftUse), slots, 2)
    for warm, observed in enumerate((greedy, sampled)):
        groups: dict[DraftUse, dict[tuple[int, int], list[tuple[float, bool]]]]
        groups = {use: defaultdict(list) for use in DraftUse}
        for seen in observed:
            groups[seen.use][seen.distance, int(seen.sibling)].append((seen.logprob, seen.accepted))
        for use, places in groups.items():
            slope[warm, use], offset[warm, use] = slope[warm, use.like], offset[warm, use.like]
            for place, pairs in places.items():
                x = logit(torch.tensor([logprob for logprob, _ in pairs], dtype=torch.float64))
                y = torch.tensor([accepted for _, accepted in pairs], dtype=torch.float64)
                index = warm, use, *place
                prior = float(slope[index]), float(offset[index])
                slope[index], offset[index] = logistic(x, y, prior, PRIOR if use.like == use else _LIKE_PRIOR)
    return Calibration(slope, offset)


def logistic(
    x: Tensor, y: Tensor, prior: tuple[float, float] = _IDENTITY, weight: float = PRIOR
) -> tuple[float, float]:
    """a and b that maximise the likelihood of y under sigmoid(a·x + b), with the prior and a >= _MIN_SLOPE.

    `weight` is the prior's, in observations.
    """
    middle, count, exact = torch.tensor(prior, dtype=torch.float64), len(x) + weight, (1e-9, 0.0)
    a, b = _likeliest(lambda now: x * now[0] + now[1], y, middle, weight, count, exact).tolist()
    if a >= _MIN_SLOPE:
        return a, b
    return _MIN_SLOPE, float(_likeliest(lambda now: x * _MIN_SLOPE + now, y, middle[1:], weight, count, exact))


def _likeliest(
    odds: Callable[[Tensor], Tensor],
    accepted: Tensor,
    prior: Tensor,
    weight: float,
    count: float,
    tolerances: tuple[float, float] = (1e-7, 1e-9),
) -> Tensor:
    """Weights like `prior` whose `odds` make what was accepted likeliest; a convex problem.

    `weight` is the prior's, in observations, `count` what the loss is divided by, and `tolerances` those of its
    gradient and of its change.
    """
    weights = prior.clone().requires_grad_()
    gradient, change = tolerances
    search = torch.optim.LBFGS(
        [weights], max_iter=_STEPS, tolerance_grad=gradient, tolerance_change=change, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        search.zero_grad()
        misfit = binary_cross_entropy_with_logits(odds(weights), accepted, reduction="sum")
        total: Tensor = (misfit + weight / 2 * ((weights - prior) ** 2).sum()) / count
        total.backward()  # type: ignore[no-untyped-call]
        return total

    search.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach()


def fit_copies(outcomes: Sequence[CopyOutcome], slots: int) -> CopyOdds:
    """The odds of copies of up to `slots` tokens that are likeliest to accept what was accepted.

    Entries without an outcome stay where the prior, `DEFAULT_ODDS`, has them.
    """
    length, support, slot = DEFAULT_ODDS
    held = [slot[min(n, len(slot) - 1)] for n in range(slots)]
    weights = torch.tensor([*length, *support, *held], dtype=torch.float64)
    if outcomes:
        numbers = torch.tensor([outcome[:3] for outcome in outcomes])
        entries = numbers + torch.tensor([0, len(LENGTHS), len(LENGTHS) + len(SUPPORT) + 2])
        accepted = torch.tensor([outcome.accepted for outcome in outcomes], dtype=torch.float64)
        weights = _likeliest(lambda now: now[entries].sum(-1), accepted, weights, _COPY_PRIOR, len(accepted))
    parts = torch.split(weights, [len(LENGTHS), len(SUPPORT) + 2, slots])
    return CopyOdds(*(part.round(decimals=4).tolist() for part in parts))


def calibrated(judged: Iterable[NodeOutcome], calibration: Calibration, warm: int) -> list[NodeOutcome]:
    """The nodes with calibrated probabilities; `warm` is 0 for T = 0, 1 for T = 1."""
    outcomes = []
    for outcome in judged:
        key = warm, outcome.use, outcome.distance, int(outcome.sibling)
        odds = calibration.slope[key] * logit(torch.tensor(outcome.logprob)) + calibration.offset[key]
        outcomes.append(outcome._replace(logprob=float(logsigmoid(odds))))
    return outcomes


def error_of(outcomes: Iterable[NodeOutcome], use: DraftUse) -> float:
    """Expected calibration error of one use's nodes; 0 without any."""
    bins = reliability_bins((outcome.prob, outcome.accepted) for outcome in outcomes if outcome.use == use)
    return calibration_error(bins) or 0.0


#: Nodes of the observed trees; smaller trees are their prefixes.
_NODE_BUDGET = 64
#: Of so many requests one is run by policies that are watched for their branches alone: their priors are fitted. And
#: by those with fewer branches: what counts is their ratio to all branches on the same requests.
_BRANCHED = 2
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


#: Prompts of each file, and tokens of an answer.
PROMPTS, TOKENS = 24, 64


def fit_of(recipe: Recipe, prompts: Sequence[Path], device: str) -> Fit:
    """The fit of `d2sd build --calibrate`, by the last prompts of these files, or of the package's.

    Raises D2SDError for a recipe that cannot be calibrated, before anything is built.
    """
    drafters = recipe.drafters
    if drafters.calibration is not None:
        raise RecipeError(
            "The recipe names a calibration, which the build puts into the bundle.",
            where="recipe: drafters.calibration",
            fix="build without --calibrate, or with --set drafters.calibration=null",
        )
    refuse_uncalibrated(recipe, drafters.sources, Path("recipe"))
    texts = [text for path in prompts or (OWN_PROMPTS,) for text in last_prompts(path, None, PROMPTS)]
    tokens = min(TOKENS, recipe.limits.max_context // 2)
    return Fit(lambda bundle: calibrate(bundle, texts, tokens, device), [texts, tokens, device])


def calibrate(bundle: Bundle, texts: Sequence[str], max_new_tokens: int, device: str = "cpu") -> CalibrationFile:
    """The calibration of a bundle by its answers to `texts`, of up to `max_new_tokens` tokens."""
    weights = fingerprints(bundle)
    requests = [chat_request(bundle, text, SamplingParams(), max_new_tokens) for text in texts]
    return fit_calibration(bundle, weights, requests, device)


def fingerprints(bundle: Bundle) -> dict[DrafterName, str]:
    """Hashes of the weights to which a calibration is tied.

    Raises D2SDError for a bundle without a drafter, and for weights that its precision has rounded.
    """
    refuse_uncalibrated(bundle.recipe, bundle.drafters, bundle.path)
    return {role.key: KINDS[drafter.config.kind].fingerprint(drafter) for role, drafter in bundle.drafters.items()}


def fit_calibration(
    bundle: Bundle, weights: Mapping[DrafterName, str], requests: Sequence[Request], device: str = "cpu"
) -> CalibrationFile:
    """Run all requests with the bundle's drafters, fit predicted to observed acceptance, and measure tokens per step by
    number of rows.

    The requests' sampling is replaced: at T = 1 the seed is the request's index.
    """
    outcomes: list[list[NodeOutcome]] = []
    tau: dict[Literal["0", "1"], dict[str, list[float]]] = {}
    uses: list[DraftUse] = []
    for key, temperature in _REGIMES:
        tau[key], uses = {}, []
        nodes = list[NodeOutcome]()
        for watched in dict.fromkeys(facts.forecast_by for facts in FACTS.values()):
            if watched is None or not can_run(bundle.draft_configs, watched):
                continue
            steps = watch(bundle, watched, requests, temperature, device)
            for policy, facts in FACTS.items():
                if facts.forecast_by == watched and facts.first_pass is not FirstPass.CARRIED:
                    tau[key][policy] = _gain(steps, tree=facts.grows)
            some = [step for step in steps if step.sequence.id % _BRANCHED == 0]
            own = policy_of_tree(bundle.recipe.tree, watched, _NODE_BUDGET, bundle.drafters).num_branches
            for count in [count for count in AUTO_BRANCHES if count < own]:  # none without a second pass
                few = watch(bundle, watched, requests[::_BRANCHED], temperature, device, branches=count)
                # changed as that of some requests changes; more rows never make it lower
                curves = zip(tau[key][watched], _gain(some), _gain(few), strict=True)
                ratio = accumulate((round(one * after / before, 4) for one, before, after in curves), max)
                tau[key][with_branches(watched, count)] = list(ratio)
            _add(nodes, uses, watched, steps)
        for branched in [name for name, facts in FACTS.items() if facts.second_use not in (None, *uses)]:
            if can_run(bundle.draft_configs, branched):
                _add(nodes, uses, branched, watch(bundle, branched, requests[::_BRANCHED], temperature, device))
        outcomes.append(nodes)
    report: dict[str, float] = {"prompts": len(requests), "max_new_tokens": max(r.max_new_tokens for r in requests)}
    slots = bundle.recipe.tree.depth - 1
    fitted = fit(outcomes[0], outcomes[1], slots)
    report |= _errors(outcomes, fitted, uses, bundle.drafters)
    slope, offset = (table.double().round(decimals=4) for table in (fitted.slope, fitted.offset))
    rows = len(DrafterRole)
    file = CalibrationFile(
        drafters=dict(weights),
        block_size=slots + 1,
        tau=tau,
        report=report,
        slope=slope[:, :rows].tolist(),
        offset=offset[:, :rows].tolist(),
        uses={
            use.key: UseTable(slope=slope[:, use, :, 0].tolist(), offset=offset[:, use, :, 0].tolist())
            for use in uses
            if use.like != use
        },
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
    branches: int | None = None,
) -> list[StepObservation]:
    """Run all requests and observe every step; calibrated trees if copies compete, else as the drafters score them.

    `branches` are those of its second pass, in place of the recipe's.
    """
    scored = partial(make_engine, bundle, policy=policy, row_budget=_NODE_BUDGET, device=device)
    engine = scored(calibrated=lookup, lookup=lookup)
    if branches is not None:
        engine.policy = replace(engine.policy, num_branches=branches)
    engine.record_trace = True
    for seed, request in enumerate(requests):
        engine.submit(replace(request, sampling=SamplingParams(temperature, seed=seed)))
    with bar(f"{engine.policy} at T = {temperature:g}", len(requests)) as advance:
        return list(run_observed(engine, advance))


def _add(nodes: list[NodeOutcome], uses: list[DraftUse], policy: PolicyName, steps: Sequence[StepObservation]) -> None:
    """Add what the steps of a policy tell about uses that no policy before it had."""
    nodes += [node for step in steps for node in step.judged if node.use not in uses]
    facts = FACTS[policy]
    uses += [use for use in (facts.first_use, facts.second_use) if use is not None and use not in uses]


def _errors(
    outcomes: list[list[NodeOutcome]], fitted: Calibration, uses: list[DraftUse], drafters: Collection[DrafterRole]
) -> dict[str, float]:
    errors = {}
    for warm, nodes in enumerate(outcomes):
        for use in uses:
            made = use.key if use.role in drafters else f"{use.key} pass"  # that the first made
            name = f"calibration error of {made} at T = {warm}"
            errors[f"{name}, before"] = round(error_of(nodes, use), 4)
            errors[f"{name}, after"] = round(error_of(calibrated(nodes, fitted, warm), use), 4)
    return errors


def _gain(observations: list[StepObservation], *, tree: bool = True) -> list[float]:
    """Mean tokens per step with 1, 2, … rows, from the row indices of every step's accepted nodes, without the root."""
    accepted = [step.path if tree else list(range(1, step.chain + 1)) for step in observations]
    return [
        round(1 + sum(sum(index < rows for index in step) for step in accepted) / len(accepted), 4)
        for rows in range(1, _NODE_BUDGET + 1)
    ]
