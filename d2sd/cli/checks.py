"""What a build proves about its bundle before publishing it; the figures go into `manifest.checks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from d2sd.errors import BuildError
from d2sd.recipe import Policy

if TYPE_CHECKING:
    from d2sd.convert.bundle import Bundle

#: Enough to notice a drafter that is read wrongly (its tau is then 1.0x), and seconds on a CPU.
_PROMPTS, _TOKENS = 4, 24


def check_bundle(bundle: Bundle) -> dict[str, Any]:
    """Greedy smoke test: chains and trees of all drafters write what plain decoding writes, and how many tokens a step.

    Returns figures as JSON values, no times among them: equal bundles must give equal figures. In fp32 any difference
    that is no tie fails the build; in half precision rounding differs between batch shapes, so agreement is a figure
    there.
    """
    from d2sd.cli.serving import OWN_PROMPTS, chat_request, make_engine, read_prompts
    from d2sd.runtime.request import SamplingParams
    from d2sd.runtime.stats import mean_tau

    budget = min(_TOKENS, bundle.recipe.limits.max_context // 2)
    prompts = [text for _, text in read_prompts(OWN_PROMPTS)[:_PROMPTS]]
    requests = [chat_request(bundle, text, SamplingParams(), budget) for text in prompts]
    requests = [r for r in requests if len(r.prompt) + budget <= bundle.recipe.limits.max_context]
    plain = [s.answer for s in make_engine(bundle, policy="off").generate(requests)]
    runnable: tuple[tuple[Policy, object], ...] = (
        ("chain", bundle.first), ("d2sd", bundle.second), ("hybrid", bundle.second),
    )  # fmt: skip
    figures: dict[str, Any] = {}
    for policy, needed in runnable:
        if needed is None:
            continue
        sequences = make_engine(bundle, policy=policy).generate(requests)
        equal = sum(s.answer == answer for s, answer in zip(sequences, plain, strict=True))
        figures[policy] = {
            "prompts": len(requests),
            "tokens_each": budget,
            "equal_to_plain_decoding": equal,
            "tau": round(mean_tau(s.stats for s in sequences), 4),
        }
        if bundle.recipe.precision == "fp32" and equal < len(requests):
            _explain(bundle, policy, [s.answer for s in sequences], plain, [r.prompt for r in requests])
    return {"greedy": figures}


def _explain(
    bundle: Bundle, policy: str, answers: list[list[int]], plain: list[list[int]], prompts: list[tuple[int, ...]]
) -> None:
    """Raise BuildError for the first difference where plain decoding's two best logits are no tie."""
    from d2sd.runtime.ties import TIE, first_difference, score_gap

    for prompt, answer, expected in zip(prompts, answers, plain, strict=True):
        place = first_difference(answer, expected)
        if place is None:
            continue
        gap = score_gap(bundle.target, [*prompt, *expected[:place]])
        if gap > TIE:
            raise BuildError(
                f"{policy} does not write what plain decoding writes", where=f"token {place} of an answer",
                found=answer[place : place + 1], expected=f"{expected[place : place + 1]} (logit gap {gap:.2g})",
                fix="this is a bug in d2sd: report it",
            )  # fmt: skip
