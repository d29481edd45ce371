"""How many GPUs a load needs within latency targets: the cost model by arithmetic, the queueing by simulation.

A GPU is one worker with Poisson arrivals of its share of the load, as behind a router that chooses at random; a router
that looks at the load does better. The targets hold if 99 % of the requests meet them: TTFT, and mean ITL.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from d2sd.bench.fleet.accepted import mean_length
from d2sd.bench.fleet.costs import WorkerModel
from d2sd.bench.fleet.load import Load, Positive
from d2sd.bench.fleet.outcome import FleetFigures, figures
from d2sd.bench.fleet.roofline import Roofline, arithmetic_costs
from d2sd.bench.fleet.simulate import Fleet, Simulation
from d2sd.bench.latency import Slo
from d2sd.build.plan import GPUS, Plan, make_plan
from d2sd.bundle.load import CALIBRATION
from d2sd.bundle.serving import forecasts_flex
from d2sd.errors import D2SDError
from d2sd.manifest import NAME, load_manifest
from d2sd.policies import BY_FLEX, FACTS
from d2sd.recipe import Drafters, DrafterSource, FlexSource, Policy, SecondSource, Source, load_recipe
from d2sd.runtime.memory import plan_kv_memory
from d2sd.runtime.request import Limits, Request

#: Share of the requests that must meet the targets.
SHARE = 0.99
#: Requests of a simulated load; those of the first fifth, while the GPU fills, are not counted.
REQUESTS = 500
_BISECTIONS = 8


class Demand(BaseModel):
    """The load and its targets."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: Annotated[float, Field(gt=0)]  # requests a second
    prompt_tokens: Positive
    output_tokens: Positive
    targets: Slo


class Option(BaseModel):
    """One policy on one kind of GPU."""

    policy: str
    served: dict[int, str]  # by batch bucket
    tokens_per_step: dict[str, float]  # of these
    gpus: int
    most_rate: float  # requests a second of a GPU within the targets
    weight_bytes: int
    pages: int  # K/V pages that fit
    figures: FleetFigures  # of one GPU at its share of the rate


def read_plan(source: Path) -> Plan:
    """The plan of a recipe, or of a bundle: a recipe whose sources are the bundle's folders."""
    if not (source / NAME).exists():
        return make_plan(load_recipe(source), weights=False)
    recipe = load_manifest(source).recipe
    named = recipe.drafters
    local = Drafters(
        first=named.first and DrafterSource(path="drafter_first"),
        second=named.second and SecondSource(path="drafter_second"),
        flex=named.flex and FlexSource(path="drafter_flex"),
        calibration=named.calibration and Source(path=CALIBRATION),
    )
    target = recipe.target.model_copy(update={"path": "target", "pypi": None, "hf": None})
    # Its checkpoints are quantized already.
    changed: dict[str, object] = {"target": target, "drafters": local, "fp8": None}
    return make_plan(recipe.model_copy(update=changed).at(source))


def compute(
    plan: Plan, gpu: str, policy: Policy, demand: Demand, max_batch: int, *, tau: float | None, efficiency: float
) -> Option:
    """GPUs of one kind that serve `demand` with `policy`. Raises D2SDError that names the bound that fails."""
    count = 2 if policy == "auto" else len(FACTS[policy].required_drafters)
    forecast = forecasts_flex(len(plan.drafters), plan.calibration)
    wanted = forecast if policy == "auto" else FACTS[policy].first_pass in BY_FLEX
    plan = replace(plan, drafters=plan.drafters[:count], flex=plan.flex if wanted else None)
    recipe = plan.recipe
    limits = replace(Limits.of(recipe.limits, max_batch), prefix_cache=False)  # prompts share nothing
    request = Request((0,) * demand.prompt_tokens, demand.output_tokens)
    limits.check(request, 1)
    pages = fitting_pages(plan, gpu, limits)
    context = demand.prompt_tokens + demand.output_tokens
    costs = arithmetic_costs(Roofline(plan, gpu, efficiency), policy, max_batch, context, tau).engines[policy]
    model, fleet = WorkerModel(costs), Fleet(limits=limits, pages=pages)
    most = most_rate(model, fleet, demand)
    gpus = math.ceil(demand.rate / most)
    return Option(
        policy=policy, served=costs.served,
        tokens_per_step={name: mean_length(one.accepted[0]) for name, one in costs.policies.items()},
        gpus=gpus, most_rate=most, weight_bytes=plan.weight_bytes, pages=pages,
        figures=simulated(model, fleet, demand, demand.rate / gpus),
    )  # fmt: skip


def fitting_pages(plan: Plan, gpu: str, limits: Limits) -> int:
    """K/V pages that the engine allocates: those of its limits, or as many as fit next to the weights in four fifths
    of the memory; the rest is for activations. Raises D2SDError if a request of max_context does not fit.
    """
    free = GPUS[gpu] * 4 // 5 - plan.weight_bytes
    page = limits.page_size * sum(part.kv_token_bytes for part in plan.parts)
    needed = limits.pages_for(limits.max_context + plan.recipe.tree.block_size)
    if free // page < needed:
        raise D2SDError(
            f"The model does not fit on one {gpu}.", where=plan.recipe.name,
            found=f"{plan.weight_bytes / 1e9:.1f} GB of weights, and {needed * page / 1e9:.1f} GB of K/V for a request",
            expected=f"at most {GPUS[gpu] * 0.8 / 1e9:.0f} GB, four fifths of its memory",
            fix="choose a larger GPU, fp8, or a lower limits.max_context",
        )  # fmt: skip
    return min(free // page - 1, plan_kv_memory(limits, plan.recipe.tree.block_size, page, free).pages)


def most_rate(model: WorkerModel, fleet: Fleet, demand: Demand) -> float:
    """Requests a second that one worker serves within the targets. Raises D2SDError if even one alone misses them."""
    alone = _run(model, fleet, demand, Load(requests=20, concurrency=1, **_lengths(demand)))
    if alone.attainment < SHARE:
        late = alone.ttft.mean > 1e3 * demand.targets.ttft
        name, found = ("TTFT", alone.ttft.mean) if late else ("ITL", alone.itl.mean)
        raise D2SDError(
            f"No number of GPUs meets the target: one request alone on a GPU misses the {name}.",
            where=f"--{name.lower()}", found=f"{found:.1f} ms",
            expected=f"at most {1e3 * (demand.targets.ttft if late else demand.targets.itl):.1f} ms",
            fix="allow more, shorten the prompt, or choose a faster GPU or policy",
        )  # fmt: skip
    full = fleet.limits.max_batch
    saturated = _run(model, fleet, demand, Load(requests=max(100, 4 * full), concurrency=full, **_lengths(demand)))
    low, high = 0.0, saturated.requests_per_second
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2
        low, high = (rate, high) if simulated(model, fleet, demand, rate).attainment >= SHARE else (low, rate)
    if not low:
        raise D2SDError("The targets leave no room for a queue.", where="--ttft", fix="allow more")
    return low


def simulated(model: WorkerModel, fleet: Fleet, demand: Demand, rate: float) -> FleetFigures:
    """Figures of one worker under `rate` requests a second."""
    return _run(model, fleet, demand, Load(requests=REQUESTS, rate=rate, **_lengths(demand)))


def _lengths(demand: Demand) -> dict[str, int]:
    return {"prompt_tokens": demand.prompt_tokens, "output_tokens": demand.output_tokens}


def _run(model: WorkerModel, fleet: Fleet, demand: Demand, load: Load) -> FleetFigures:
    streams, run = load.streams(model.profiles), Simulation(model, fleet)
    run.run(streams, load.concurrency)
    begin = streams[len(streams) // 5].arrival
    end = max(stream.arrival for stream in streams) if load.rate else run.now
    return figures(run, streams, demand.targets, (begin, math.nextafter(end, math.inf)))
