"""Makes engines from a loaded bundle, and requests in its target's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from d2sd.bundle.backends import BackendName, make_runner
from d2sd.bundle.chat import Messages, encode_prompt
from d2sd.bundle.turns import encode_turns
from d2sd.errors import BundleError, RequestError
from d2sd.policies import BY_FLEX, FACTS, DrafterRole, FirstPass
from d2sd.progress import bar
from d2sd.recipe import Policy, Tree

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle
    from d2sd.calibration import CalibrationFile
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.policy_selector import PolicySelector
    from d2sd.runtime.request import Request
    from d2sd.runtime.sampling_params import SamplingParams
    from d2sd.runtime.speculation.policy import Policy as TreePolicy
    from d2sd.runtime.step_times import Forecast

#: Node budgets that `auto` compares: throughput is flat around the optimum. A tile of the CPU kernels has twelve rows.
_ROWS = (4, 8, 12, 16, 24, 32, 64)


def make_engine(
    bundle: Bundle,
    *,
    policy: Policy | None = None,
    row_budget: int | None = None,
    device: str = "cpu",
    backend: BackendName = "torch",
    max_batch: int | None = None,
    calibrated: bool = True,
    prefix_cache: bool | None = None,
    selector: PolicySelector | None = None,
) -> Engine:
    """Make an engine for the bundle's models; arguments that are not given default to the recipe's values.

    Raises BundleError if the bundle lacks a drafter that the policy needs. `calibrated=False` uses the drafters' raw
    probabilities. `selector` reuses the measurements of another engine of the same bundle, device and batch size. Step
    times of `auto` are measured once per machine and kept in the user's cache folder.
    """
    from d2sd.bundle.step_times import step_times
    from d2sd.runtime.buckets import buckets
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.request import Limits
    from d2sd.runtime.speculation.calibration import Calibration

    recipe = bundle.recipe
    name, rows = policy or recipe.tree.policy, row_budget or recipe.tree.row_budget
    file, count = bundle.calibration, sum(d is not None for d in (bundle.first, bundle.second))
    flex = bundle.flex is not None and forecasts_flex(count, file)
    parallel = backend == "torch" and can_run(bundle, "flex_parallel")
    candidates = candidate_policies(recipe.tree, count, name, rows, file, flex=flex, parallel=parallel)
    drafters = [bundle.first, bundle.second][: max(len(candidate.required_drafters) for candidate in candidates)]
    if None in drafters:
        raise BundleError(
            f"The policy needs {len(drafters)} drafters.", where=bundle.path,
            found=f"{count}", fix="choose another with --policy",
        )  # fmt: skip
    flex = any(candidate.first_pass in BY_FLEX for candidate in candidates)
    if flex and bundle.flex is None:
        raise BundleError(
            "The policy needs a FlexDraft head.", where=bundle.path, expected="drafters.flex in its recipe",
            fix="choose another with --policy",
        )  # fmt: skip
    if name == "flex_parallel" and not can_run(bundle, name):
        raise BundleError(
            "An anchored FlexDraft head has no parallel mode.", where=bundle.path, fix="choose flex with --policy"
        )
    if backend != "torch" and any(candidate.first_pass is FirstPass.CARRIED for candidate in candidates):
        raise BundleError(
            "Graphs and engines of a FlexDraft head have no parallel mode.", where=bundle.path,
            found=f"{name} by {backend}", fix="choose flex with --policy, or serve it with --executor torch",
        )  # fmt: skip
    models = [drafter for drafter in drafters if drafter is not None]
    limits = Limits.of(recipe.limits, max_batch)
    if prefix_cache is not None:
        limits = replace(limits, prefix_cache=prefix_cache)
    engine = Engine(
        make_runner(bundle, models, backend, device, flex=flex),
        candidates[-1],
        limits,
        decode=lambda ids: bundle.tokenizer.decode(ids, skip_special_tokens=True),
        calibration=Calibration.of(file.slope, file.offset) if file and calibrated else None,
    )
    if selector is not None:
        engine.selector = selector
    elif len(candidates) > 1 and file is not None:
        curves = forecasts(file)
        with bar("measuring step costs", len(buckets(engine.limits.max_batch))) as advance:
            engine.enable_auto(candidates, curves, advance, step_times(bundle, engine, candidates, backend))
    return engine


def can_run(bundle: Bundle, name: Policy) -> bool:
    """Whether the bundle has the drafters of policy `name`; `auto` needs one drafter, or FlexDraft. An anchored head
    has no parallel mode.
    """
    if name == "flex_parallel" and bundle.flex is not None and bundle.flex.config.anchored:
        return False
    has = {role for role, one in zip(DrafterRole, (bundle.first, bundle.second, bundle.flex), strict=True) if one}
    return bool(has) if name == "auto" else has.issuperset(FACTS[name].roles)


def forecasts_flex(drafters: int, calibration: CalibrationFile | None) -> bool:
    """Whether `auto` can compare FlexDraft with the drafters' policies, or has it alone."""
    return drafters == 0 or (calibration is not None and "flex" in calibration.tau["0"])


def candidate_policies(
    tree: Tree, drafters: int, name: Policy, rows: int, file: CalibrationFile | None = None, *,
    flex: bool = False, parallel: bool = True,
) -> list[TreePolicy]:  # fmt: skip
    """The named policy; for `auto` all that `drafters` drafters and FlexDraft can run. The engine starts with the last.

    They are sorted by their nodes. Those that the calibration `file` does not forecast are left out. `parallel`:
    FlexDraft has its parallel mode too.
    """
    from d2sd.runtime.speculation.policy import make_policy

    if name != "auto":
        return [make_policy(name, block_size=tree.block_size, branches=tree.branches, row_budget=rows)]
    roles = {*list(DrafterRole)[:drafters], *([DrafterRole.FLEX] if flex else [])}
    found = [make_policy("off", block_size=tree.block_size, branches=tree.branches, row_budget=1)]
    known = {kind for kind, facts in FACTS.items() if facts.forecast_by} if file is None else forecasts(file)
    for kind, facts in FACTS.items():
        carried = facts.first_pass is FirstPass.CARRIED
        if kind not in known or not roles.issuperset(facts.roles) or (carried and not parallel):
            continue
        sizes = [size for size in _ROWS if size <= rows] if facts.grows else [rows]
        if carried:  # every row of it is followed by a block of mask rows
            sizes = [*(size for size in _ROWS if size < min(rows, tree.block_size)), rows]
        found += [
            make_policy(kind, block_size=tree.block_size, branches=tree.branches, row_budget=size) for size in sizes
        ]
    found.sort(key=lambda one: (one.first_pass is not FirstPass.CARRIED, len(one.required_drafters)))
    return sorted(found, key=lambda one: one.num_nodes)  # of equal nodes, the one with more drafters is the last


def forecasts(file: CalibrationFile) -> Forecast:
    """Tokens a step by nodes of every policy that `auto` may choose: its own curve, or that of one with equal trees."""
    found = dict[str, tuple[list[float], list[float]]]()
    for name, facts in FACTS.items():
        if facts.forecast_by is None:
            continue
        equal = [one for one, o in FACTS.items() if (o.forecast_by, o.grows) == (facts.forecast_by, facts.grows)]
        if (known := next((one for one in equal if one in file.tau["0"]), None)) is not None:
            found[name] = file.tau["0"][known], file.tau["1"][known]
    return found


def chat_request(
    bundle: Bundle,
    prompt: str | Messages,
    sampling: SamplingParams,
    max_new_tokens: int,
    *,
    raw: bool = False,
    stop: tuple[str, ...] = (),
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Request:
    """Make a request that ends at the target's stop tokens.

    `prompt` is a conversation, `[{"role": ..., "content": ...}, ...]`, or one user turn; both are put into the target's
    chat template, with `tools` in OpenAI's format. With `raw`, or where the target has no template, a string is encoded
    without one. Raises `RequestError` for malformed messages and for a template that cannot be rendered.
    """
    from d2sd.runtime.request import Request

    tokenizer = bundle.tokenizer
    if isinstance(prompt, str) and (raw or not tokenizer.chat_template):
        ids = encode_prompt(tokenizer, prompt)
    elif raw or not tokenizer.chat_template:
        raise RequestError(
            "A conversation needs a chat template.", where=bundle.path / "target",
            found="raw" if raw else "none in tokenizer_config.json", fix="pass one string, as LLM.generate() takes it",
        )  # fmt: skip
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        where = f"{bundle.path / 'target'}: chat_template"
        ids = encode_turns(tokenizer, messages, bundle.recipe.target.template, where, tools)
    return Request(tuple(ids), max_new_tokens, sampling, frozenset(bundle.stop_token_ids), stop)
