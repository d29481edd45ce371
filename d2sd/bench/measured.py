"""Decode steps of a bundle as an engine measured them on the user's GPU, with the tokens that each gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from d2sd.build.plan import Plan
from d2sd.bundle.serving import auto_policies, candidate_policies, check_policy, forecasts, policy_of_tree
from d2sd.bundle.step_times import About, measured_step_times
from d2sd.errors import D2SDError
from d2sd.io import cache_folder, digest
from d2sd.manifest import NAME, load_manifest
from d2sd.recipe import Policy
from d2sd.runtime.policy_selector import PolicySelector, forecast_tau
from d2sd.runtime.request import buckets
from d2sd.runtime.speculation.policy import Off
from d2sd.runtime.speculation.policy import Policy as TreePolicy
from d2sd.runtime.step_times import Forecast, StepTimes


class Step(BaseModel):
    """A decode step of `batch` requests by the policy that an engine serves them with."""

    batch: int
    policy: str
    seconds: float
    tokens: float  # that each request gains

    @property
    def itl(self) -> float:
        """Mean seconds from token to token."""
        return self.seconds / self.tokens

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second of all requests together."""
        return self.batch / self.itl


@dataclass(frozen=True, slots=True)
class StepFiles:
    """The files in which engines keep step times, and the times in them that are of a plan on a kind of GPU."""

    files: Sequence[Path]
    bundle: str | None  # hash of its files' hashes; None: any
    gpu: str
    ranks: int

    @staticmethod
    def of(plan: Plan, gpu: str, given: Path | None) -> StepFiles:
        """Measurements in d2sd's cache folder, or the one `given`. A recipe has none but that."""
        folder, files = plan.recipe.folder, [given] if given is not None else _kept()
        is_bundle = (folder / NAME).exists()
        bundle = digest(load_manifest(folder).files) if is_bundle else None
        return StepFiles(files if is_bundle or given is not None else [], bundle, gpu, plan.ranks)

    def find(self, policies: Sequence[TreePolicy], sizes: Sequence[int]) -> StepTimes | None:
        """Step times of all `policies` and `sizes`, but of trees that did not pay."""
        return measured_step_times(self.files, self._matches, policies, sizes)

    def _matches(self, about: About) -> bool:
        same = self.bundle in (None, about.bundle) and about.ranks == self.ranks and about.backend == "torch"
        return same and about.gpu is not None and is_kind(about.gpu, self.gpu)


def is_kind(name: str, gpu: str) -> bool:
    """Whether a GPU that calls itself `name` is of this kind: `NVIDIA H100 80GB HBM3`, but not `NVIDIA GH200`."""
    return gpu in name.split()


def step_costs(
    plan: Plan, files: StepFiles, policy: Policy, max_batch: int, context: int, tau: float | None = None
) -> list[Step]:
    """Steps of an engine of `policy` by batch bucket, for requests of `context` tokens each; none if `files` lack them.

    `tau` is the tokens a step of the policy, in place of the calibration's forecast at the recipe's temperature. Raises
    D2SDError if it is out of range, or if there is neither.
    """
    tree, temperature = plan.recipe.tree, plan.recipe.sampling.temperature
    drafters, named = {role: part.draft_config for role, part in plan.drafters.items()}, plan.recipe.drafters.sources
    if policy == "auto":
        candidates = candidate_policies(tree, tree.row_budget, auto_policies(drafters, plan.calibration), named)
    else:
        check_policy(drafters, policy, Path(plan.recipe.name))
        candidates = [policy_of_tree(tree, policy, tree.row_budget, named)]
    if tau is not None and not 1 <= tau <= tree.depth:
        expected = f"1 .. {tree.depth}, the most of a step"
        raise D2SDError("Tokens a step are out of range.", where="--tau", found=tau, expected=expected)
    largest = candidates[-1]
    if policy != "auto" or tau is not None or plan.calibration is None:
        candidates = [largest] if isinstance(largest, Off) else [Off(1), largest]
    batches = buckets(max_batch)
    seconds = _seconds(files, candidates, batches, context, all_of=policy != "auto")
    if seconds is None:
        return []
    forecast = _forecast(plan, candidates, tau)
    selector = PolicySelector(candidates, StepTimes.of(seconds), forecast)
    chosen = {size: selector.choose(size, temperature).policy if policy == "auto" else largest for size in batches}
    return [
        Step(
            batch=size,
            policy=str(choice),
            seconds=seconds[choice, size],
            tokens=forecast_tau(forecast, choice, temperature),
        )
        for size, choice in chosen.items()
    ]


def _kept() -> list[Path]:
    """The files of d2sd's cache folder; none where the user has no home."""
    try:
        return [*cache_folder().glob("step-times-*.json")]
    except OSError:
        return []


def _seconds(
    files: StepFiles, candidates: Sequence[TreePolicy], batches: Sequence[int], context: int, *, all_of: bool
) -> dict[tuple[TreePolicy, int], float] | None:
    """Seconds of the steps that a GPU has measured: trees that did not pay there are missing, unless `all_of` them."""
    times = files.find(candidates, batches)
    if times is None:
        return None
    found = {(one, size): times.step(one, size, context) for one in candidates for size in batches}
    known = {step: seconds for step, seconds in found.items() if seconds is not None}
    return None if all_of and len(known) < len(found) else known


def _forecast(plan: Plan, policies: Sequence[TreePolicy], tau: float | None) -> Forecast:
    if tau is not None:
        return {policy.name: ([tau], [tau]) for policy in policies if not isinstance(policy, Off)}
    known = {} if plan.calibration is None else forecasts(plan.calibration, plan.recipe.tree.branches)
    missing = [str(policy) for policy in policies if policy.drafters and policy.name not in known]
    if missing:
        raise D2SDError(
            "The tokens a step are unknown: they depend on the drafters.",
            where=plan.recipe.name,
            found=f"no calibration of {', '.join(missing)}",
            fix="name a calibration in the recipe (d2sd calibrate), or pass --tau",
        )
    return known
