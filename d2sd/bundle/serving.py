"""Makes engines from a loaded bundle."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from d2sd.bundle.backends import make_runner
from d2sd.bundle.devices import BackendName
from d2sd.bundle.options import EngineOptions
from d2sd.errors import BundleError, RecipeError
from d2sd.policies import FACTS, LOOKUP, NAMES, DrafterRole, FirstPass, PolicyName, parse_method, with_branches
from d2sd.progress import bar
from d2sd.recipe import Policy, Tree

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle
    from d2sd.calibration import CalibrationFile
    from d2sd.modeling.config import DraftConfig
    from d2sd.modeling.tensor_parallel import Group
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.model_runner import ModelRunner
    from d2sd.runtime.policy_selector import PolicySelector
    from d2sd.runtime.speculation.calibration import Calibration
    from d2sd.runtime.speculation.policy import Policy as TreePolicy
    from d2sd.runtime.step_times import Forecast

    #: Configs of a bundle's drafters.
    Drafters = Mapping[DrafterRole, DraftConfig]

#: Nodes of a tree that has room for one branch alone, and of one in which each branch brings half of the tokens a step
#: that the branch before it did. Fitted to the trees that SmolLM2's drafters made in 122 steps with up to 7 branches:
#: it misses what the first 1 and 2 bring there by a quarter at most.
_ONE_BRANCH, _HALF_AS_MUCH = 4, 32


def make_engine(
    bundle: Bundle,
    options: EngineOptions | None = None,
    *,
    row_budget: int | None = None,
    calibrated: bool = True,
    selector: PolicySelector | None = None,
    lookup: bool | None = None,
    **named: Any,
) -> Engine:
    """Make an engine for the bundle's models, by options or by those `named`; what is not given is the recipe's.

    Raises BundleError if the bundle lacks a drafter that the policy needs. `calibrated=False` uses the drafters' raw
    probabilities. Of `selector`, of another engine of the same bundle, device and batch size, the measurements are
    reused, not what it learned. Step times of `auto` are measured once per machine and kept in the user's cache folder.
    """
    from d2sd.bundle.step_times import step_times
    from d2sd.runtime.cuda_graphs.steps import DecodeSteps
    from d2sd.runtime.drafting.window import Window
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.parallel.leader import LeadingSteps
    from d2sd.runtime.request import Limits, buckets

    recipe, file, ranks, options = bundle.recipe, bundle.calibration, bundle.ranks, options or EngineOptions(**named)
    device, backend, max_batch = options.device, options.backend, options.max_batch
    policy, copies = parse_method(options.policy or recipe.tree.policy)
    name, rows = cast("Policy", policy), row_budget or recipe.tree.row_budget
    tree = recipe.tree.model_copy(update={"lookup": copies or (recipe.tree.lookup if lookup is None else lookup)})
    if name == "auto":
        names = auto_policies(bundle.draft_configs, file, backend)
        candidates = candidate_policies(tree, rows, names, bundle.drafters)
    else:
        check_policy(bundle.draft_configs, name, bundle.path, backend)
        candidates = [policy_of_tree(tree, name, rows, bundle.drafters)]
    roles = {role for candidate in candidates for role in candidate.drafters}
    limits = Limits.of(recipe.limits, max_batch)
    if options.prefix_cache is not None:
        limits = replace(limits, prefix_cache=options.prefix_cache)
    make_steps: type[DecodeSteps] = DecodeSteps
    if ranks is not None:
        device, make_steps = ranks.device, LeadingSteps
        ranks.begin_engine({"roles": sorted(roles), "max_batch": max_batch, "calibrated": calibrated})
    runner = make_runner(bundle, roles, backend, device)
    candidates = _joining(runner, candidates, bundle.path)
    if recipe.drafters.window is not None:
        runner.drafts.window = Window.of(recipe.drafters.window, limits.page_size)
    engine = Engine(
        runner,
        candidates[-1],
        limits,
        decode=lambda ids: bundle.tokenizer.decode(ids, skip_special_tokens=True),
        calibration=scores_of(file) if file and calibrated else None,
        make_steps=make_steps,
    )
    if selector is not None:
        engine.allow(candidates)
        engine.selector = selector.fresh()
    elif len(candidates) > 1 and file is not None:
        curves = forecasts(file, tree.branches)
        with bar("measuring step costs", len(buckets(engine.limits.max_batch))) as advance:
            engine.enable_auto(candidates, curves, advance, step_times(bundle, engine, candidates, backend))
    return engine


def _joining(runner: ModelRunner, candidates: list[TreePolicy], where: Path) -> list[TreePolicy]:
    """The policies but those that draft in the target's pass where these models cannot. Raises BundleError if none is
    left.
    """
    if _joins(runner):
        return candidates
    if not (others := [policy for policy in candidates if policy.first_pass is not FirstPass.CARRIED]):
        raise BundleError(
            "This head cannot draft in the target's pass on this device.",
            where=where,
            found="projections of the head that are not compiled as the target's are, such as FP8 ones",
            expected="both in FP8, or neither",
            fix="choose another {policy}: chain or ddtree",
        )
    return others


def _joins(runner: ModelRunner) -> bool:
    """Whether the first drafter, if it drafts in the target's pass, can do so between these models."""
    from d2sd.modeling.drafters.flexdraft import FlexHead

    head = runner.drafters.get(DrafterRole.FIRST)
    return not isinstance(head, FlexHead) or head.joins(runner.target)


def offer_choices(bundle: Bundle, engine: Engine) -> None:
    """Let requests choose among the policies that the engine's models can run, with the recipe's node budget.

    On a GPU those that are captured before the first request: to capture another one would delay every request.
    """
    runner, tree = engine.runner, bundle.recipe.tree
    if runner.capture is not None:
        ready, auto = [engine.policy], engine.selector
        if auto is not None:
            ready = [policy for policy in auto.policies if (policy, 1) in auto.times.seconds]
        engine.offer({policy.name: policy for policy in ready})  # the largest of each name
        return
    policies: dict[str, TreePolicy] = {}
    for name in NAMES:
        facts = FACTS[name].among(bundle.drafters)
        runs = can_run(bundle.draft_configs, name) and set(facts.drafters) <= runner.drafters.keys()
        if runs and (facts.first_pass is not FirstPass.CARRIED or _joins(runner)):
            try:
                policies[name] = policy_of_tree(tree, name, tree.row_budget, bundle.drafters)
            except RecipeError:  # a budget of one node, or more branches than a block has boundaries
                continue
    engine.offer(policies)


def follow_engine(
    bundle: Bundle, group: Group, device: str, *, roles: Sequence[int], max_batch: int | None, calibrated: bool
) -> None:
    """Run what rank 0 sends, with this rank's part of the target, until its engine ends; arguments are `make_engine`'s.

    Raises PeerLost if another rank is gone.
    """
    from d2sd.runtime.cuda_graphs.steps import DecodeSteps
    from d2sd.runtime.drafting.window import Window
    from d2sd.runtime.parallel.follower import Follower
    from d2sd.runtime.request import Limits

    recipe, file = bundle.recipe, bundle.calibration
    limits = Limits.of(recipe.limits, max_batch)
    runner = make_runner(bundle, [DrafterRole(role) for role in roles], "torch", device)
    if recipe.drafters.window is not None:
        runner.drafts.window = Window.of(recipe.drafters.window, limits.page_size)
    scores = scores_of(file).to(device) if file and calibrated else None
    Follower(runner, DecodeSteps(runner, limits, scores), group).run()


def scores_of(file: CalibrationFile) -> Calibration:
    """The scores of drafts and copies that a calibration holds."""
    from d2sd.runtime.speculation.calibration import Calibration, CopyOdds, Lines

    tables = [] if file.copies is None else [file.copies["0"], file.copies["1"]]
    copies = [CopyOdds(one.length, one.support, one.slot) for one in tables] or None
    uses = {key: Lines(one.slope, one.offset) for key, one in file.uses.items()}
    return Calibration.of(file.slope, file.offset, copies, uses)


def policy_of_tree(tree: Tree, name: PolicyName, rows: int, drafters: Collection[DrafterRole]) -> TreePolicy:
    """The policy with a recipe's settings and at most `rows` nodes, in a bundle that has these drafters.

    Raises RecipeError as `make_policy` does.
    """
    from d2sd.runtime.speculation.policy import make_policy

    branches, lookup = tree.branches, tree.lookup
    made = make_policy(name, block_size=tree.longest(name), branches=branches, row_budget=rows, lookup=lookup)
    return made.among(drafters)


def check_policy(drafters: Drafters, name: PolicyName, where: Path, backend: BackendName = "torch") -> None:
    """Raise BundleError if the bundle `where` with these drafters cannot run the policy."""
    facts = FACTS[name].among(drafters)
    if missing := [role.key for role in facts.drafters if role not in drafters]:
        raise BundleError(
            f"The policy {name} needs a drafter that the bundle does not have.",
            where=where,
            found=", ".join(role.key for role in drafters) or "no drafters",
            expected=f"drafters.{missing[0]} in its recipe",
            fix="choose another {policy}",
        )
    if reason := next(filter(None, (drafters[role].refusal(name) for role in facts.drafters)), None):
        raise BundleError(reason, where=where, found=name, fix="choose another {policy}")
    if backend != "torch" and facts.first_pass is FirstPass.CARRIED:
        raise BundleError(
            "Graphs and engines do not draft in the pass that verifies.",
            where=where,
            found=f"{name} by {backend}",
            fix="choose another {policy}, or torch for {executor}",
        )


def can_run(drafters: Drafters, name: Policy, backend: BackendName = "torch") -> bool:
    """Whether a bundle with these drafters has what the policy needs; `auto` needs a drafter."""
    if name == "auto":
        return bool(drafters)
    try:
        check_policy(drafters, name, Path(), backend)
    except BundleError:
        return False
    return True


def auto_policies(
    drafters: Drafters, calibration: CalibrationFile | None, backend: BackendName = "torch"
) -> list[PolicyName]:
    """The policies that `auto` compares: those with a forecast; without a calibration, those each of whose drafters has
    its own place: a second pass of the first gains little (docs/bring-your-model.md).
    """
    runs = [name for name, facts in FACTS.items() if facts.forecast_by is not None and can_run(drafters, name, backend)]
    if calibration is None:
        return [name for name in runs if FACTS[name].drafters[-1] in drafters]
    known = forecasts(calibration)
    return [name for name in runs if name in known]


def candidate_policies(
    tree: Tree, rows: int, names: Sequence[PolicyName], drafters: Collection[DrafterRole]
) -> list[TreePolicy]:
    """Plain decoding and these policies with the node budgets up to `rows` and the branches up to the recipe's that
    `auto` compares, sorted by their nodes.

    The engine starts with the last; of equal nodes, the one with more passes, then branches, comes later. `drafters`
    are the bundle's.
    """
    from d2sd.runtime.speculation.policy import policy_class

    make = partial(policy_of_tree, drafters=drafters)
    policies = [make(tree, "off", 1)]
    for name in (*names, "lookup") if tree.lookup and names else names:
        for size, branches in policy_class(name).candidates(tree.longest(name), tree.branches, rows):
            policies.append(make(tree.model_copy(update={"branches": branches}), name, size))
    passes = {name: len(FACTS[name].drafters) for name in (*names, "off", "lookup")}
    return sorted(policies, key=lambda entry: (entry.num_nodes, passes[entry.name], entry.num_branches))


def forecasts(file: CalibrationFile, branches: int = 1) -> Forecast:
    """Tokens a step by nodes of every policy that `auto` may choose: its own curve, or that of one with equal trees.

    Curves with copies are under the policy's name and LOOKUP, those with fewer than `branches`, the recipe's, under
    `with_branches`.
    """
    curves = dict[str, tuple[list[float], list[float]]]()
    for name, facts in FACTS.items():
        if facts.forecast_by is None:
            continue
        equal = [other for other, o in FACTS.items() if (o.forecast_by, o.grows) == (facts.forecast_by, facts.grows)]
        if (known := next((other for other in equal if other in file.tau["0"]), None)) is not None:
            curves[name] = file.tau["0"][known], file.tau["1"][known]
        if name + LOOKUP in file.tau["0"]:
            curves[name + LOOKUP] = file.tau["0"][name + LOOKUP], file.tau["1"][name + LOOKUP]
    return {**curves, **_of_fewer_branches(file, curves, branches)}


def _of_fewer_branches(file: CalibrationFile, curves: Forecast, branches: int) -> Forecast:
    """Curves of fewer branches than the recipe's: the calibration's, or, where it is older than they are, interpolated
    between those of one pass and of all branches: each branch, the likeliest first, brings a part of what the one
    before it did, which grows with the tree (`_HALF_AS_MUCH`). Copies add to each what they add to all branches.
    """
    from d2sd.runtime.speculation.policy import AUTO_BRANCHES

    found = dict[str, tuple[Sequence[float], Sequence[float]]]()
    second = [name for name, facts in FACTS.items() if name in curves and facts.second_use is not None]
    for name, count in product(second, (count for count in AUTO_BRANCHES if count < branches)):
        key, every, alone = with_branches(name, count), curves[name], curves.get("ddtree", curves[name])
        between = (_between(*pair, count, branches) for pair in zip(alone, every, strict=True))
        greedy, sampled = (
            file.tau[warm].get(key) or curve for warm, curve in zip(sorted(file.tau), between, strict=True)
        )
        found[key] = greedy, sampled
        if copying := curves.get(name + LOOKUP):
            added = zip(found[key], every, copying, strict=True)
            greedy, sampled = ([a + c - b for a, b, c in zip(*three, strict=False)] for three in added)
            found[key + LOOKUP] = greedy, sampled
    return found


def _between(alone: Sequence[float], every: Sequence[float], count: int, branches: int) -> list[float]:
    """The part of the way from one curve to the other that the first `count` of `branches` bring."""
    curve = []
    for nodes, (least, most) in enumerate(zip(alone, every, strict=False), 1):
        kept = max(0, nodes - _ONE_BRANCH) / (nodes + _HALF_AS_MUCH - 2 * _ONE_BRANCH)
        curve.append(least + (most - least) * (1 - kept**count) / (1 - kept**branches))
    return curve
