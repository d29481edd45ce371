"""FP8 in a build: its stages, the runs that they need, and the comparison with the unquantized bundle.

plain_target   the target in the recipe's precision, unless the source already is a checkpoint folder
texts          prompts with answers sampled from the unquantized target, for calibration and for the comparison
target         calibrated on the texts
drafter_*      each calibrated while it drafts for the bundle's target, after the drafters that it follows

ModelOpt reads unquantized models, which are not part of the bundle. Every run uses small trees: they show the effect of
FP8, and a CPU has to emulate FP8 for each node.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from d2sd.build.fp8_scales import ModelOpt, quantize_drafter, quantize_target
from d2sd.build.plan import Part, Plan
from d2sd.build.stage_cache import StageCache
from d2sd.build.validate.perplexity import Text, compare_texts
from d2sd.bundle.load import Bundle
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import make_engine
from d2sd.convert.checkpoint.offline import load_tokenizer
from d2sd.convert.checkpoint.target import load_target, stop_tokens, write_target
from d2sd.convert.checkpoint.weights import DTYPES
from d2sd.convert.kinds import KINDS, load_drafter
from d2sd.errors import BuildError
from d2sd.io import digest, read_json, write_json
from d2sd.manifest import Manifest
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.policies import FACTS, DrafterRole, policy_of, trees_of
from d2sd.prompts import OWN_PROMPTS, read_prompts
from d2sd.recipe import FP8, Policy
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.stats import mean_tau

#: Maximum nodes of a tree in these runs.
_NODES = 16
#: Maximum prompts to calibrate drafters on: their scales are maxima over every block of every step.
_DRAFTER_PROMPTS = 16


@dataclass(frozen=True, slots=True)
class Fp8Build:
    """`plain` is the manifest of the same bundle without FP8; `source` a folder with the target in 16 bits."""

    plan: Plan
    work: StageCache
    modelopt: ModelOpt
    plain: Manifest
    source: Path

    @property
    def wanted(self) -> FP8:
        assert self.plan.recipe.fp8 is not None
        return self.plan.recipe.fp8

    def texts(self) -> list[Text]:
        """The stage `texts`, read back."""
        values = read_json(self.work.internal / "texts" / "texts.json")["texts"]
        return [Text(**text) for text in values]

    def inputs(self) -> dict[str, object]:
        """Inputs of an FP8 stage, in addition to the model's source."""
        return {"fp8": self.wanted.model_dump(mode="json"), "texts": digest([asdict(text) for text in self.texts()])}

    def write_texts(self, folder: Path) -> None:
        """Write prompts with answers that the unquantized target samples at temperature 1."""
        with self.work.progress("sampling texts"):
            done = self._generate(self._bundle({}, self.source), "off", SamplingParams(temperature=1.0))
        texts = [Text([*s.request.prompt, *s.answer], len(s.request.prompt)) for s in done]
        folder.mkdir(parents=True)
        write_json(folder / "texts.json", {"texts": [asdict(text) for text in texts]})

    def makes(self, part: Part) -> bool:
        """Whether this part is quantized to FP8."""
        return self.wanted.target if part is self.plan.target else self.wanted.drafters

    def write(self, part: Part, folder: Path) -> None:
        """Write the FP8 model of a part into `folder`."""
        if part is self.plan.target:
            self._write_target(folder)
        else:
            self._write_drafter(part, folder)

    def _write_target(self, folder: Path) -> None:
        precision, progress = self.plan.recipe.precision, self.work.progress
        with self.work.scratch() as exported:
            quantize_target(
                self.modelopt,
                self.source,
                exported,
                [text.ids for text in self.texts()],
                dtype=DTYPES[precision],
                kv=self.wanted.kv,
                progress=progress,
            )
            write_target(exported, folder, precision, progress, text_side=self.source)

    def _write_drafter(self, part: Part, folder: Path) -> None:
        """Write a drafter, calibrated together with the models that the bundle already holds."""
        assert part.role is not None
        policy, drafter = policy_of(part.role), self._drafter(part)
        drafters = {
            role: drafter if role is part.role else load_drafter(self.work.bundle / role.folder, self._dtype)
            for role in FACTS[policy].drafters
        }
        answer = partial(self._generate, self._bundle(drafters), policy, SamplingParams(), _DRAFTER_PROMPTS)
        with self.work.progress(f"calibrating {part.name}"):
            quantized = quantize_drafter(self.modelopt, part.kind, drafter, answer)
        part.kind.write(folder, drafter.config, *quantized)

    def compare(self, bundle: Bundle) -> dict[str, Any]:
        """Compare the finished bundle with the unquantized one; return figures for `manifest.checks`.

        Raises `BuildError` if a change exceeds a bound of the recipe.
        """
        plain = self._bundle({role: self._drafter(part) for role, part in self.plan.drafters.items()}, self.source)
        texts = self.texts()
        figures: dict[str, Any] = {"prompts": len(texts), "tokens_each": self._tokens}
        if self.wanted.target:
            figures["target"] = self._compare_targets(plain, bundle, texts)
        if bundle.drafters:
            figures["tau"] = self._compare_tau(plain, bundle)
        return figures

    def _compare_targets(self, plain: Bundle, fp8: Bundle, texts: list[Text]) -> dict[str, Any]:
        with self.work.progress("comparing targets", len(texts)) as advance:
            figures = compare_texts(plain.target, fp8.target, texts, advance)
        before, after = figures.get("perplexity", (1.0, 1.0))
        if (bound := self.wanted.max_perplexity_rise) is not None and after > before * (1 + bound):
            raise _exceeded("The target's perplexity rises", "max_perplexity_rise", before, after, bound)
        return figures

    def _compare_tau(self, plain: Bundle, fp8: Bundle) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        for policy in dict.fromkeys([*map(policy_of, fp8.drafters), *trees_of(fp8.drafters)]):
            runs = []
            for bundle, name in ((plain, "unquantized"), (fp8, "FP8")):
                with self.work.progress(f"{policy}, {name}"):
                    runs.append(self._generate(bundle, policy, SamplingParams()))
            before, after = (mean_tau(s.stats for s in run) for run in runs)
            if (bound := self.wanted.max_tau_drop) is not None and after < before * (1 - bound):
                raise _exceeded(f"Tokens a step of {policy} fall", "max_tau_drop", before, after, bound)
            figures[policy] = {
                "tau": [round(before, 4), round(after, 4)],
                "tau_change": round(after / before - 1, 4),
                "equal_answers": sum(a.answer == b.answer for a, b in zip(*runs, strict=True)),
            }
        return figures

    def _generate(
        self, bundle: Bundle, policy: Policy, sampling: SamplingParams, limit: int | None = None
    ) -> list[Sequence]:
        """Answers to the first `limit` of the recipe's prompts that fit its context."""
        recipe, most = self.plan.recipe, self.plan.recipe.limits.max_context
        path = recipe.path(self.wanted.prompts) if self.wanted.prompts else OWN_PROMPTS
        texts = [text for _, text in read_prompts(path)[: self.wanted.count]]
        requests = [chat_request(bundle, text, sampling, self._tokens) for text in texts]
        requests = [request for request in requests if len(request.prompt) + self._tokens <= most]
        if not requests:
            raise BuildError("No prompt to calibrate FP8 on fits.", where=f"{path}", expected=f"below {most} tokens")
        nodes = min(_NODES, bundle.recipe.tree.row_budget)
        engine = make_engine(bundle, policy=policy, row_budget=nodes, calibrated=False, lookup=False)
        return engine.generate(requests[:limit])

    @property
    def _tokens(self) -> int:
        """Tokens of an answer."""
        return min(self.wanted.tokens, self.plan.recipe.limits.max_context // 2)

    def _drafter(self, part: Part) -> DraftModel:
        drafter: DraftModel = part.kind.load(Path(part.source), self._dtype, part.config)
        return drafter

    def _bundle(self, drafters: dict[DrafterRole, DraftModel], target: Path | None = None) -> Bundle:
        """A bundle in memory: with the target of the bundle under construction if it is there, else the plain one."""
        folder = self.work.bundle / "target"
        model = load_target(target or (folder if folder.is_dir() else self.source), self._dtype)
        for drafter in drafters.values():
            KINDS[drafter.config.kind].attach(drafter, model)
        return Bundle(
            path=self.work.bundle,
            manifest=self.plain,
            target=model,
            drafters=drafters,
            tokenizer=load_tokenizer(self.source),
            stop_token_ids=stop_tokens(self.source),
            calibration=None,
        )

    @property
    def _dtype(self) -> Any:
        return DTYPES[self.plan.recipe.precision]


def _exceeded(what: str, key: str, before: float, after: float, bound: float) -> BuildError:
    return BuildError(
        f"{what} by more than the recipe allows.",
        where=f"fp8.{key}",
        found=f"{before:.4g} -> {after:.4g}",
        expected=f"a change of at most {bound:.1%}",
        fix="leave more layers unquantized (fp8.kv: false, fp8.drafters: false), or raise the bound",
    )
