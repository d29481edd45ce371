"""Checks that a bundle must pass before it is published; the figures go into `manifest.checks`."""

from __future__ import annotations

from typing import Any

from d2sd.build.validate.drafter_config import check_drafter_config
from d2sd.build.validate.graph_parity import check_graphs
from d2sd.build.validate.near_ties import TIE_TOLERANCE, first_mismatch, top2_margin
from d2sd.bundle.load import Bundle
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import can_run, make_engine
from d2sd.errors import BuildError
from d2sd.policies import FACTS
from d2sd.progress import Progress, silent
from d2sd.prompts import OWN_PROMPTS, read_prompts
from d2sd.recipe import Recipe
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.stats import mean_tau


def check_bundle(bundle: Bundle, progress: Progress = silent) -> dict[str, Any]:
    """Decode the check prompts greedily under every policy and compare with plain decoding.

    Returns figures as JSON values, without timings: equal bundles must give equal figures. Raises BuildError
    if, in fp32, a policy's answer differs from plain decoding and the two best logits are not tied (in half precision
    rounding depends on batch shapes, so agreement is only reported); if a drafter is accepted clearly more often under
    another reading of its config (`drafter_config.py`); and if the first drafter's chain is below `checks.min_tau`.
    """
    recipe = bundle.recipe
    budget = min(recipe.checks.tokens, recipe.limits.max_context // 2)
    prompts = read_prompts(recipe.path(recipe.checks.prompts) if recipe.checks.prompts else OWN_PROMPTS)
    requests = [chat_request(bundle, text, SamplingParams(), budget) for _, text in prompts[: recipe.checks.count]]
    requests = [r for r in requests if len(r.prompt) + budget <= recipe.limits.max_context]
    sequences = make_engine(bundle, policy="off").generate(requests)
    plain = [s.answer for s in sequences]
    fit = check_drafter_config(bundle, sequences, progress)
    figures: dict[str, Any] = {}
    for policy in [name for name, facts in FACTS.items() if facts.proven and can_run(bundle.draft_configs, name)]:
        sequences = make_engine(bundle, policy=policy).generate(requests)
        equal = sum(s.answer == answer for s, answer in zip(sequences, plain, strict=True))
        figures[policy] = {
            "prompts": len(requests),
            "tokens_each": budget,
            "equal_to_plain_decoding": equal,
            "tau": round(mean_tau(s.stats for s in sequences), 4),
        }
        if recipe.precision == "fp32" and equal < len(requests):
            _explain(bundle, policy, [s.answer for s in sequences], plain, [r.prompt for r in requests])
        if policy == "chain":
            _check_min_tau(recipe, figures[policy]["tau"], len(requests))
    graphs = check_graphs(bundle, requests, plain) if recipe.engines else {}
    return {"greedy": figures, "fit": fit} | graphs


def _check_min_tau(recipe: Recipe, tau: float, prompts: int) -> None:
    """Raise BuildError where the first drafter's chain commits fewer tokens a step than the recipe asks for."""
    least = recipe.checks.min_tau
    if least is not None and tau < least:
        raise BuildError(
            "The first drafter's accepted length is below the recipe's minimum.",
            where="recipe: checks.min_tau",
            found=f"{tau} tokens a step on {prompts} prompts",
            expected=f"at least {least}",
            fix="use the drafter that was trained for this target, or lower checks.min_tau",
        )


def _explain(
    bundle: Bundle, policy: str, answers: list[list[int]], plain: list[list[int]], prompts: list[tuple[int, ...]]
) -> None:
    """Raise BuildError for the first difference where plain decoding's two best logits are not tied."""
    for prompt, answer, expected in zip(prompts, answers, plain, strict=True):
        index = first_mismatch(answer, expected)
        if index is None:
            continue
        gap = top2_margin(bundle.target, [*prompt, *expected[:index]])
        if gap > TIE_TOLERANCE:
            raise BuildError(
                f"The policy {policy} does not produce the tokens of plain decoding.",
                where=f"token {index} of an answer",
                found=answer[index : index + 1],
                expected=f"{expected[index : index + 1]} (logit gap {gap:.2g})",
                fix="this is a bug in d2sd: report it",
            )
