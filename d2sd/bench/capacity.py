"""How many GPUs a load needs within latency targets, by arithmetic over step times, tokens a step and memory.

A GPU that always decodes the same number of requests gives each of them a prefill and its decode steps in turn; the
largest rate within the targets is what it sustains. Random arrivals queue in front of a GPU that is always busy, so
GPUs are counted at a share of that rate. The queue itself is not computed: it needs a measurement under load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from d2sd.bench.roofline import Measured, Roofline, StepCost, step_costs
from d2sd.build.plan import GPUS, Plan, make_plan
from d2sd.bundle.load import CALIBRATION
from d2sd.bundle.serving import auto_policies
from d2sd.errors import D2SDError
from d2sd.manifest import NAME, load_manifest
from d2sd.policies import FACTS
from d2sd.recipe import Drafters, Policy, load_recipe
from d2sd.runtime.memory import plan_kv_memory
from d2sd.runtime.request import Limits, Request, bucket

#: Share of the rate a GPU sustains that it is given; the rest is for arrivals that bunch. An assumption.
UTILIZATION = 0.8

Positive = Annotated[int, Field(ge=1)]


class Slo(BaseModel):
    """Bounds in seconds of a request that counts for goodput: of its TTFT, and of its mean inter-token latency."""

    ttft: float
    itl: float


class Demand(BaseModel):
    """The load and its targets."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: Annotated[float, Field(gt=0)]  # requests a second
    prompt_tokens: Positive
    output_tokens: Positive
    targets: Slo


class Operation(BaseModel):
    """A GPU that always decodes `batch` requests."""

    batch: int
    rate: float  # requests a second that it finishes
    ttft: float  # seconds of a request that arrives in a step, without a queue
    itl: float  # seconds, mean of a request


class Option(BaseModel):
    """One policy on one kind of GPU."""

    policy: str
    served: dict[int, str]  # by batch bucket
    tokens_per_step: dict[str, float]  # of these
    measured: bool = False  # whether its step times are the user's GPU's
    gpus: int
    most_rate: float  # requests a second that a GPU is given
    weight_bytes: int
    pages: int  # K/V pages that fit
    request_pages: int  # of these, the ones of a whole request
    sustained: Operation


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


def compute(
    roofline: Roofline, policy: Policy, demand: Demand, max_batch: int, tau: float | None, measured: Measured | None
) -> Option:
    """GPUs of one kind that serve `demand` with `policy`. Raises D2SDError that names the bound that fails.

    `tau` and `measured`: see `step_costs`.
    """
    plan, gpu = roofline.plan, roofline.gpu
    configs = {role: part.draft_config for role, part in plan.drafters.items()}
    names = auto_policies(configs, plan.calibration) if policy == "auto" else [policy]
    roles = {role for name in names for role in FACTS[name].among(configs).drafters}
    plan = replace(plan, drafters={role: part for role, part in plan.drafters.items() if role in roles})
    limits = Limits.of(plan.recipe.limits, max_batch)
    limits.check(Request((0,) * demand.prompt_tokens, demand.output_tokens), 1)
    pages = fitting_pages(plan, gpu, limits)
    request_pages = limits.pages_for(demand.prompt_tokens + demand.output_tokens + plan.recipe.tree.block_size)
    roofline = replace(roofline, plan=plan)
    context = demand.prompt_tokens + demand.output_tokens // 2  # in the middle of its answer
    costs = step_costs(roofline, policy, max_batch, context, tau, measured)
    prompt, chunk = demand.prompt_tokens, limits.prefill_chunk
    chunks = [roofline.prefill_seconds(min(chunk, prompt - start), start) for start in range(0, prompt, chunk)]
    # The pages that fit hold a request of max_context, and so at least one of this load.
    sustained = most_sustained(costs, chunks, demand, min(max_batch, max(1, pages // request_pages)))
    most_rate = UTILIZATION * sustained.rate
    return Option(
        policy=policy,
        served={size: cost.policy for size, cost in costs.items()},
        tokens_per_step={cost.policy: cost.tokens for cost in costs.values()},
        measured=any(cost.measured for cost in costs.values()),
        gpus=math.ceil(demand.rate / most_rate) * plan.ranks,
        most_rate=most_rate,
        weight_bytes=plan.weight_bytes,
        pages=pages,
        request_pages=request_pages,
        sustained=sustained,
    )


def operation(cost: StepCost, chunks: list[float], demand: Demand, batch: int) -> Operation:
    """The work of a GPU with `batch` requests at all times: when one ends, the next one is there."""
    prefill, steps = sum(chunks), max(1.0, demand.output_tokens / cost.tokens)
    # Alone a request waits for its prefill and one step; among others for the step in progress, and a step a chunk.
    waited = 1 if batch == 1 else len(chunks) + 1
    return Operation(
        batch=batch,
        rate=batch / (batch * prefill + steps * cost.seconds),
        ttft=prefill + waited * cost.seconds,
        itl=cost.seconds / cost.tokens + (batch - 1) * prefill / demand.output_tokens,
    )


def most_sustained(costs: Mapping[int, StepCost], chunks: list[float], demand: Demand, most: int) -> Operation:
    """The highest rate within the targets of up to `most` requests together. Raises D2SDError if one alone misses."""
    targets, alone = demand.targets, operation(costs[1], chunks, demand, 1)
    late = alone.ttft > targets.ttft
    if late or alone.itl > targets.itl:
        name, reached, target = ("TTFT", alone.ttft, targets.ttft) if late else ("ITL", alone.itl, targets.itl)
        raise D2SDError(
            f"No number of GPUs meets the target: one request alone on a GPU misses the {name}.",
            where=f"--{name.lower()}",
            found=f"{1e3 * reached:.1f} ms",
            expected=f"at most {1e3 * target:.1f} ms",
            fix="allow more, shorten the prompt, or choose a faster GPU or policy",
        )
    together = (operation(costs[bucket(batch)], chunks, demand, batch) for batch in range(1, most + 1))
    within = (point for point in together if point.ttft <= targets.ttft and point.itl <= targets.itl)
    return max(within, key=lambda point: point.rate)


def fitting_pages(plan: Plan, gpu: str, limits: Limits) -> int:
    """K/V pages that the engine allocates: those of its limits, or as many as fit next to the weights in four fifths
    of the memory; the rest is for activations, and for the features on their way to the drafters. Raises D2SDError if a
    request of max_context does not fit.
    """
    free = GPUS[gpu] * 4 // 5 - plan.weight_bytes
    page, block = limits.page_size * sum(part.kv_token_bytes for part in plan.parts), plan.recipe.tree.block_size
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
    state = plan.state_bytes
    fitting = plan_kv_memory(replace(limits, kv_memory=free), block, page, windowed=windowed, state_bytes=state)
    return min(fitting.pages, plan_kv_memory(limits, block, page, free, windowed, state).pages)
