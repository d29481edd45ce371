"""FP8 stages of a build. ModelOpt reads unquantized models, which are not part of the bundle.

plain_target   the target in the recipe's precision, unless the source already is a checkpoint folder
texts          prompts with answers sampled from the unquantized target, for calibration and for the comparison
target         calibrated on the texts
drafter_*      each calibrated while it drafts for the bundle's target, after the drafters that it follows
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from d2sd.build.fp8_scales import ModelOpt, quantize_drafter, quantize_target
from d2sd.build.plan import Part, Plan
from d2sd.build.stage_cache import StageCache
from d2sd.build.validate.fp8 import compare_fp8, exercise_drafters, sample_texts
from d2sd.build.validate.perplexity import Text
from d2sd.bundle.load import Bundle
from d2sd.convert.checkpoint.offline import load_tokenizer
from d2sd.convert.checkpoint.target import load_target, stop_tokens, write_target
from d2sd.convert.checkpoint.weights import DTYPES
from d2sd.convert.kinds import kind_of
from d2sd.io import digest, read_json, write_json
from d2sd.manifest import Manifest
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.policies import FACTS, DrafterRole, policy_of
from d2sd.recipe import FP8


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
        plain = self._bundle({}, self.source)
        texts = sample_texts(plain, self.plan.recipe, self.work.progress)
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
                self.modelopt, self.source, exported, [text.ids for text in self.texts()],
                dtype=DTYPES[precision], kv=self.wanted.kv, progress=progress,
            )  # fmt: skip
            write_target(exported, folder, precision, progress, text_side=self.source)

    def _write_drafter(self, part: Part, folder: Path) -> None:
        """Write a drafter, calibrated together with the models that the bundle already holds."""
        assert part.role is not None
        policy, drafter = policy_of(part.role), self._drafter(part)
        drafters = {
            role: drafter if role is part.role else kind_of(role).load(self.work.bundle / role.folder, self._dtype)
            for role in FACTS[policy].drafters
        }
        bundle, recipe = self._bundle(drafters), self.plan.recipe
        with self.work.progress(f"calibrating {part.name}"):
            made = quantize_drafter(
                self.modelopt, part.kind, drafter, lambda: exercise_drafters(bundle, policy, recipe)
            )
        part.kind.write(folder, drafter.config, *made)

    def compare(self, bundle: Bundle) -> dict[str, Any]:
        """Compare the finished bundle with the unquantized one; return figures."""
        plain = self._bundle({role: self._drafter(part) for role, part in self.plan.drafters.items()}, self.source)
        return compare_fp8(plain, bundle, self.texts(), self.plan.recipe, self.work.progress)

    def _drafter(self, part: Part) -> DraftModel:
        drafter: DraftModel = part.kind.load(Path(part.source), self._dtype, part.config)
        return drafter

    def _bundle(self, drafters: dict[DrafterRole, DraftModel], target: Path | None = None) -> Bundle:
        """A bundle in memory: with the target of the bundle under construction if it is there, else the plain one."""
        made = self.work.bundle / "target"
        model = load_target(target or (made if made.is_dir() else self.source), self._dtype)
        for role, drafter in drafters.items():
            kind_of(role).attach(drafter, model)
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
