"""Requests of a bundle that a GPU holds, and its decode steps where an engine has measured them on such a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

from pydantic import BaseModel, Field

from d2sd.bench.markdown import table
from d2sd.bench.measured import Step, StepFiles, step_costs
from d2sd.build.plan import GPUS, Plan, make_plan
from d2sd.bundle.load import CALIBRATION
from d2sd.bundle.serving import auto_policies
from d2sd.errors import D2SDError
from d2sd.manifest import NAME, load_manifest
from d2sd.policies import FACTS, parse_method
from d2sd.recipe import Drafters, Method, Policy, load_recipe
from d2sd.runtime.memory import PoolBytes, plan_kv_memory
from d2sd.runtime.request import Limits, Request
from d2sd.schema import Closed

Positive = Annotated[int, Field(ge=1)]


class Lengths(Closed):
    """Tokens of each request."""

    prompt_tokens: Positive
    output_tokens: Positive

    @property
    def context(self) -> int:
        """Tokens of context in the middle of the answer."""
        return self.prompt_tokens + self.output_tokens // 2


class Option(BaseModel):
    """One policy on one kind of GPU."""

    policy: str
    weight_bytes: int
    pages: int  # K/V pages that fit
    request_pages: int  # of these, the ones of a whole request
    steps: list[Step] = []  # none where nothing was measured


class Sheet(BaseModel):
    """The sheet as JSON."""

    name: str  # of the recipe
    source: str
    precision: str
    gpu: str
    max_batch: int
    ranks: int = 1  # GPUs that share the target
    lengths: Lengths
    options: list[Option]

    def markdown(self) -> str:
        """The sheet as text."""
        lengths, first = self.lengths, self.options[0]
        shared = f" {self.ranks} GPUs share the target; bytes are of one." if self.ranks > 1 else ""
        columns = [(option.policy, list(_memory(option).values())) for option in self.options]
        lines = [
            f"# Capacity: {self.name} on {self.gpu}",
            "",
            f"Requests of {lengths.prompt_tokens} prompt and {lengths.output_tokens} output tokens; precision "
            f"{self.precision}. Weights and K/V fill at most four fifths of {GPUS[self.gpu] // 10**9} GB."
            f"{shared}",
            "",
            table([("", list(_memory(first))), *columns]),
            "",
            *self._speed(),
            "",
        ]
        return "\n".join(lines)

    def _speed(self) -> list[str]:
        """The decode steps, or how to measure them."""
        steps = [step for option in self.options for step in option.steps]
        if not steps:
            ranks = f" --tensor-parallel {self.ranks}" if self.ranks > 1 else ""
            return [
                f"Nothing is known of its speed: no step times of {self.source} were measured on such a GPU. An engine "
                "that chooses among policies measures them at its first start, of a bundle with a calibration, and "
                "keeps them:",
                "",
                f"    D2SD_NO_FALLBACK=1 d2sd generate {self.source} --policy auto --device cuda -p Hello{ranks}",
                "",
                "They are a file `step-times-….json` in d2sd's cache folder; `--step-times FILE` reads one of another "
                "machine.",
            ]
        columns = {
            "requests in a step": [str(step.batch) for step in steps],
            "served": [step.policy for step in steps],
            "step, ms": [f"{1e3 * step.seconds:.2f}" for step in steps],
            "tokens a step of each": [f"{step.tokens:.2f}" for step in steps],
            "ITL, mean, ms": [f"{1e3 * step.itl:.2f}" for step in steps],
            "output tokens/s": [f"{step.tokens_per_second:.0f}" for step in steps],
        }
        return [
            f"Decode steps as measured on such a GPU, of {self.lengths.context} tokens of context a request:",
            "",
            table([*columns.items()]),
            "",
            "Tokens a step are the calibration's forecast, or the given ones. Prefill and queueing are not in these "
            "figures: measure them under load.",
        ]


def _memory(option: Option) -> dict[str, str]:
    """The memory of one policy under its headings."""
    return {
        "weights": f"{option.weight_bytes / 1e9:.2f} GB",
        "K/V pages that fit": f"{option.pages:,}",
        "K/V pages of a request": f"{option.request_pages:,}",
        "requests that they hold": f"{option.pages // option.request_pages:,}",
    }


def read_plan(source: Path) -> Plan:
    """The plan of a recipe, or of a bundle: a recipe whose sources are the bundle's folders."""
    if not (source / NAME).exists():
        return make_plan(load_recipe(source), weights=False)
    recipe = load_manifest(source).recipe
    named = recipe.drafters
    folders = {role.key: {"path": role.folder} for role in named.sources}
    local = Drafters.model_validate(folders | ({"calibration": CALIBRATION} if named.calibration else {}))
    target = recipe.target.model_copy(update={"path": "target", "pypi": None})
    # Its checkpoints are quantized already.
    changed: dict[str, object] = {"target": target, "drafters": local, "fp8": None}
    return make_plan(recipe.model_copy(update=changed).at(source))


def make_sheet(
    plan: Plan,
    source: Path,
    gpu: str,
    lengths: Lengths,
    max_batch: int | None = None,
    policy: Method | None = None,
    tau: float | None = None,
    step_times: Path | None = None,
) -> Sheet:
    """Plain decoding and `policy`, by default the recipe's; `tau` is the tokens a step of the latter.

    `step_times` is a file that an engine has kept; None: those of this bundle in d2sd's cache folder. Raises D2SDError
    where a request is longer than `limits.max_context`, where the model does not fit, and by `step_costs`.
    """
    recipe = plan.recipe
    named, copies = parse_method(policy or recipe.tree.policy)
    tree = recipe.tree.model_copy(update={"lookup": copies or recipe.tree.lookup})
    plan = replace(plan, recipe=recipe.model_copy(update={"tree": tree}))
    limits, chosen = Limits.of(recipe.limits, max_batch), cast("Policy", named)
    limits.check(Request((0,) * lengths.prompt_tokens, lengths.output_tokens), 1)
    files = StepFiles.of(plan, gpu, step_times)
    options = [
        _option(plan, files, name, lengths, limits, tau if name == chosen else None)
        for name in dict.fromkeys(("off", chosen))
    ]
    if step_times is not None and not any(option.steps for option in options):
        raise D2SDError(
            "This file has no step times of this bundle on such a GPU.",
            where=step_times,
            expected=f"times of {source} on {gpu}, of batches up to {limits.max_batch}, by {plan.ranks} GPUs together",
        )
    return Sheet(
        name=recipe.name,
        source=str(source),
        precision=recipe.precision + (" with FP8" if recipe.fp8 else ""),
        gpu=gpu,
        max_batch=limits.max_batch,
        ranks=plan.ranks,
        lengths=lengths,
        options=options,
    )


def _option(
    plan: Plan, files: StepFiles, policy: Policy, lengths: Lengths, limits: Limits, tau: float | None
) -> Option:
    """One policy; the drafters that it does not run take no memory."""
    configs = {role: part.draft_config for role, part in plan.drafters.items()}
    names = auto_policies(configs, plan.calibration) if policy == "auto" else [policy]
    roles = {role for name in names for role in FACTS[name].among(configs).drafters}
    plan = replace(plan, drafters={role: part for role, part in plan.drafters.items() if role in roles})
    steps = step_costs(plan, files, policy, limits.max_batch, lengths.context, tau)
    pages = limits.pages_for(lengths.prompt_tokens + lengths.output_tokens + plan.recipe.tree.depth)
    return Option(
        policy=policy,
        weight_bytes=plan.weight_bytes,
        pages=fitting_pages(plan, files.gpu, limits),
        request_pages=pages,
        steps=steps,
    )


def fitting_pages(plan: Plan, gpu: str, limits: Limits) -> int:
    """K/V pages that the engine allocates: those of its limits, or as many as fit next to the weights in four fifths
    of the memory; the rest is for activations, and for the features on their way to the drafters. Raises D2SDError if a
    request of max_context does not fit.
    """
    free = GPUS[gpu] * 4 // 5 - plan.weight_bytes
    page, block = limits.page_size * sum(part.kv_token_bytes for part in plan.parts), plan.recipe.tree.depth
    needed, windowed = limits.pages_for(limits.max_context + block) * page, plan.windowed
    if windowed is not None:
        needed -= (limits.pages_for(limits.max_context + block) - windowed.pages(limits, block)) * windowed.page_bytes
    if free < needed:
        raise D2SDError(
            f"The model does not fit on one {gpu}.",
            where=plan.recipe.name,
            found=f"{plan.weight_bytes / 1e9:.1f} GB of weights, and {needed / 1e9:.1f} GB of K/V for a request",
            expected=f"at most {GPUS[gpu] * 0.8 / 1e9:.0f} GB, four fifths of its memory",
            fix="choose a larger GPU, fp8, or a lower limits.max_context",
        )
    each = PoolBytes(page, windowed, plan.state_bytes)
    fitting = plan_kv_memory(replace(limits, kv_memory=free), block, each)
    return min(fitting.pages, plan_kv_memory(limits, block, each, free).pages)
