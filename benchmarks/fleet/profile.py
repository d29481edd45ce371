"""Measure the step costs of a bundle on this machine: what `auto` times, prefill, and accepted lengths."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import torch

from benchmarks.fleet.accepted import mean_length, shares
from benchmarks.fleet.costs import EngineCosts, PolicyCosts, StepCosts, load_costs, save_costs
from d2sd.bench.provenance import provenance
from d2sd.bundle.load import Bundle
from d2sd.bundle.serving import chat_request, make_engine
from d2sd.errors import D2SDError
from d2sd.progress import Progress, silent
from d2sd.prompts import OWN_PROMPTS, read_prompts
from d2sd.recipe import Policy
from d2sd.runtime.buckets import buckets
from d2sd.runtime.engine import Engine
from d2sd.runtime.policy_selector import PolicySelector
from d2sd.runtime.request import SamplingParams
from d2sd.runtime.speculation.policy import Off
from d2sd.runtime.speculation.policy import Policy as TreePolicy
from d2sd.runtime.step_times import StepTimes, time_steps

#: Each time is the least of so many rounds, in processor time: other work on the machine only adds to it.
_ROUNDS = 3
#: Context lengths that a step is timed at; its time is taken to be linear in between and beyond.
_CONTEXTS = (32, 256)
_REPEATS = 5


def profile(
    bundle: Bundle, policies: Sequence[Policy], path: Path, new_tokens: int = 48, progress: Progress = silent
) -> StepCosts:
    """Measure an engine of each policy at the recipe's temperature, and write the costs to `path` after each.

    Policies that are in the file already are kept. Raises D2SDError if the file is of another bundle or machine.
    """
    made = provenance({"name": bundle.recipe.name}, "cpu")
    threads, processor = made.machine["threads"], made.machine["processor"]
    model = f"{bundle.recipe.name} in {bundle.recipe.precision}"
    source = f"{model}, {processor}, threads: {threads}, torch {torch.__version__}"
    costs = StepCosts(kind="measured", source=source, engines={})
    if path.exists():
        costs = load_costs(path)
        if costs.source != source:
            raise D2SDError("The step costs are of another machine.", where=path, found=costs.source, expected=source)
    with progress("measuring step costs", len(policies)) as advance:
        for policy in policies:
            if policy not in costs.engines:
                costs = replace_engine(costs, policy, _measure(bundle, policy, new_tokens))
                save_costs(path, costs)
            advance(1)
    return costs


def replace_engine(costs: StepCosts, policy: str, engine: EngineCosts) -> StepCosts:
    """The costs with those of one more engine."""
    return costs.model_copy(update={"engines": costs.engines | {policy: engine}})


def _measure(bundle: Bundle, policy: Policy, new_tokens: int) -> EngineCosts:
    engine = make_engine(bundle, policy=policy, prefix_cache=False)
    sizes, temperature = buckets(engine.limits.max_batch), bundle.recipe.sampling.temperature
    served = dict.fromkeys(sizes, engine.policy)
    selector, engine.selector = engine.selector, None
    if selector is not None:
        served = {size: selector.choose(size, temperature) for size in sizes}
    chosen = list(dict.fromkeys([*([selector.off] if selector else []), *served.values()]))
    costs = {
        one: PolicyCosts(seconds=_decode(engine, one), accepted=_accepted(bundle, engine, one, temperature, new_tokens))
        for one in chosen
    }
    if selector is not None:
        served = _served(selector, costs, sizes, temperature)
    rows = [count for count in buckets(engine.limits.prefill_chunk) if count >= 8]
    deep = engine.limits.max_context // 2
    calls = [(count, _prefill(engine, served[1], count, 0)) for count in rows]
    slope = (_prefill(engine, served[1], rows[-1], deep) - calls[-1][1]) / (rows[-1] * deep)
    return EngineCosts(
        served={size: str(one) for size, one in served.items()},
        policies={str(one): costs[one] for one in dict.fromkeys(served.values())},
        prefill=calls, prefill_context=max(0.0, slope),
    )  # fmt: skip


def _served(
    selector: PolicySelector, costs: Mapping[TreePolicy, PolicyCosts], sizes: Sequence[int], temperature: float
) -> dict[int, TreePolicy]:
    """What `auto` comes to serve: it corrects its forecast by the acceptance that it observes."""
    seconds = {
        (one, size): empty + slope * _CONTEXTS[1]
        for one, measured in costs.items()
        for size, (empty, slope) in measured.seconds.items()
    }
    found = PolicySelector(list(costs), StepTimes.of(seconds), selector.forecast)
    observed = [
        (mean([mean_length(one) for one in measured.accepted]) - 1) / (found.expected(policy, temperature) - 1)
        for policy, measured in costs.items()
        if policy is not found.off
    ]
    found.acceptance_scale = mean(observed) if observed else 1.0
    return {size: found.choose(size, temperature) for size in sizes}


def _decode(engine: Engine, policy: TreePolicy) -> dict[int, tuple[float, float]]:
    """Seconds of a step by batch bucket: without context, and for every token of it."""
    plain = policy if isinstance(policy, Off) else Off(1)
    found = []
    for context in _CONTEXTS:
        rounds = [
            time_steps(
                engine.runner, list(dict.fromkeys([plain, policy])), {}, engine.limits, steps=engine.steps,
                clock=time.process_time, context=context,
            )
            for _ in range(_ROUNDS)
        ]  # fmt: skip
        found.append({size: min(timed[policy, size] for timed in rounds) for size in buckets(engine.limits.max_batch)})
    short, long = _CONTEXTS
    lines = {}
    for size, seconds in found[0].items():
        slope = max(0.0, (found[1][size] - seconds) / (long - short))
        lines[size] = max(0.0, seconds - slope * short), slope
    return lines


def _prefill(engine: Engine, policy: TreePolicy, rows: int, context: int) -> float:
    """Least seconds of a prefill of one request, and of injecting its context into the policy's drafters."""
    runner, zeros = engine.runner, torch.zeros(rows, dtype=torch.long)
    table = torch.zeros(1, engine.limits.pages_for(context + rows), dtype=torch.long)
    taken = []
    for _ in range(1 + _ROUNDS * _REPEATS):
        start = time.process_time()
        runner.prefill(zeros, [rows], table, torch.tensor([context]))
        runner.context.inject(policy.required_drafters)
        taken.append(time.process_time() - start)
    return min(taken[1:])


def _accepted(
    bundle: Bundle, engine: Engine, policy: TreePolicy, temperature: float, new_tokens: int
) -> list[list[float]]:
    """Distribution of accepted lengths in the answer to each of d2sd's own prompts."""
    longest = engine.runner.block_size
    if isinstance(policy, Off):
        return [shares([1], longest)]
    engine.policy = policy
    params = [SamplingParams(temperature, seed=seed) for seed, _ in enumerate(read_prompts(OWN_PROMPTS))]
    texts = [text for _, text in read_prompts(OWN_PROMPTS)]
    requests = [chat_request(bundle, text, one, new_tokens) for text, one in zip(texts, params, strict=True)]
    return [shares(one.stats.accepted.elements(), longest) for one in engine.generate(requests)]
