"""What a build asks of the runtime when it makes FP8: texts to calibrate on, drafts to watch, and what FP8 changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from d2sd.errors import BuildError
from d2sd.recipe import FP8, Policy, Recipe

if TYPE_CHECKING:
    from d2sd.convert.build.fp8 import Fp8Trials, Text
    from d2sd.convert.bundle.load import Bundle
    from d2sd.runtime.request import Request, SamplingParams
    from d2sd.runtime.sequence import Sequence


def fp8_trials(recipe: Recipe) -> Fp8Trials | None:
    """The trials of a recipe; None where it makes no FP8."""
    from d2sd.convert.build.fp8 import Fp8Trials

    wanted = recipe.fp8
    if wanted is None:
        return None
    runs = _Runs(recipe, wanted)
    return Fp8Trials(texts=runs.texts, exercise=runs.exercise, compare=runs.compare)


#: Rows of the trees here: what they gain or lose shows with few, and a CPU emulates every one.
_ROWS = 16
#: Prompts to calibrate drafters on, at most: theirs are maxima over every block of every step.
_EXERCISES = 16


class _Runs:
    def __init__(self, recipe: Recipe, wanted: FP8) -> None:
        self._recipe, self._wanted = recipe, wanted

    def texts(self, bundle: Bundle) -> list[Text]:
        """Prompts with answers that the target samples at temperature 1: what it says, as often as it says it."""
        from d2sd.convert.build.fp8 import Text
        from d2sd.runtime.request import SamplingParams

        done = self._run(bundle, "off", SamplingParams(temperature=1.0), "sampling texts")
        return [Text([*s.request.prompt, *s.answer], len(s.request.prompt)) for s in done]

    def exercise(self, bundle: Bundle) -> None:
        from d2sd.runtime.request import SamplingParams

        policy: Policy = "chain" if bundle.second is None else "hybrid"
        self._run(bundle, policy, SamplingParams(), "drafting", _EXERCISES)

    def compare(self, plain: Bundle, fp8: Bundle, texts: list[Text]) -> dict[str, Any]:
        """Figures of both bundles; raises `BuildError` where a bound of the recipe is exceeded."""
        figures: dict[str, Any] = {"prompts": len(texts), "tokens_each": self._budget}
        if self._wanted.target:
            figures["target"] = self._compare_targets(plain, fp8, texts)
        if fp8.first is not None:
            figures["tau"] = self._compare_tau(plain, fp8)
        return figures

    def _compare_targets(self, plain: Bundle, fp8: Bundle, texts: list[Text]) -> dict[str, Any]:
        from d2sd.convert.validate.perplexity import compare_texts
        from d2sd.progress import bar

        with bar("comparing targets", len(texts)) as advance:
            found = compare_texts(plain.target, fp8.target, texts, advance)
        before, after = found.get("perplexity", (1.0, 1.0))
        if (bound := self._wanted.max_perplexity_rise) is not None and after > before * (1 + bound):
            raise _exceeded("The target's perplexity rises", "max_perplexity_rise", before, after, bound)
        return found

    def _compare_tau(self, plain: Bundle, fp8: Bundle) -> dict[str, Any]:
        from d2sd.runtime.request import SamplingParams
        from d2sd.runtime.stats import mean_tau

        figures: dict[str, Any] = {}
        policies: tuple[Policy, ...] = ("chain", "ddtree" if fp8.second is None else "hybrid")
        for policy in policies:
            runs = [self._run(b, policy, SamplingParams(), f"{policy}, {name}") for b, name in
                    ((plain, "unquantized"), (fp8, "FP8"))]  # fmt: skip
            before, after = (mean_tau(s.stats for s in run) for run in runs)
            if (bound := self._wanted.max_tau_drop) is not None and after < before * (1 - bound):
                raise _exceeded(f"Tokens a step of {policy} fall", "max_tau_drop", before, after, bound)
            figures[policy] = {
                "tau": [round(before, 4), round(after, 4)],
                "tau_change": round(after / before - 1, 4),
                "equal_answers": sum(a.answer == b.answer for a, b in zip(*runs, strict=True)),
            }
        return figures

    def _run(
        self, bundle: Bundle, policy: Policy, sampling: SamplingParams, what: str, most: int | None = None
    ) -> list[Sequence]:
        from d2sd.convert.bundle.serving import make_engine
        from d2sd.progress import bar

        requests = self._requests(bundle, sampling)[:most]
        rows = min(_ROWS, bundle.recipe.tree.row_budget)
        engine = make_engine(bundle, policy=policy, row_budget=rows, calibrated=False)
        with bar(what):
            return engine.generate(requests)

    def _requests(self, bundle: Bundle, sampling: SamplingParams) -> list[Request]:
        from d2sd.convert.bundle.serving import chat_request
        from d2sd.prompts import OWN_PROMPTS, read_prompts

        limit = self._recipe.limits.max_context
        path = self._recipe.path(self._wanted.prompts) if self._wanted.prompts else OWN_PROMPTS
        prompts = read_prompts(path)[: self._wanted.count]
        made = [chat_request(bundle, text, sampling, self._budget) for _, text in prompts]
        made = [request for request in made if len(request.prompt) + self._budget <= limit]
        if not made:
            raise BuildError("No prompt to calibrate FP8 on fits.", where=f"{path}", expected=f"below {limit} tokens")
        return made

    @property
    def _budget(self) -> int:
        return min(self._wanted.tokens, self._recipe.limits.max_context // 2)


def _exceeded(what: str, key: str, before: float, after: float, bound: float) -> BuildError:
    return BuildError(
        f"{what} by more than the recipe allows.", where=f"fp8.{key}", found=f"{before:.4g} -> {after:.4g}",
        expected=f"a change of at most {bound:.1%}",
        fix="leave more layers wide (fp8.kv: false, fp8.drafters: false), or raise the bound",
    )  # fmt: skip
