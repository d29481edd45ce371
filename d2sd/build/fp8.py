"""FP8 stages of a build. ModelOpt reads unquantized models, which are not part of the bundle.

plain_target   the target in the recipe's precision, unless the source already is a checkpoint folder
texts          prompts with answers sampled from the unquantized target, for calibration and for the comparison
target         calibrated on the texts
drafter_*      each calibrated while it drafts for the bundle's target, the first before the second, FlexDraft alone
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
from d2sd.convert.checkpoint.drafter import load_drafter, write_drafter
from d2sd.convert.checkpoint.flex import load_flex, write_flex
from d2sd.convert.checkpoint.offline import load_tokenizer
from d2sd.convert.checkpoint.target import load_target, stop_tokens, write_target
from d2sd.convert.checkpoint.weights import DTYPES
from d2sd.io import digest, read_json, write_json
from d2sd.manifest import Manifest
from d2sd.modeling.config import DrafterConfig
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
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
        plain = self._bundle(target=self.source)
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
        elif part is self.plan.flex:
            self._write_flex(part, folder)
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
        drafter = self._drafter(part)
        first = self.work.bundle / "drafter_first"
        if part.name == first.name:
            bundle = self._bundle(first=drafter)
        else:
            bundle = self._bundle(first=load_drafter(first, self._dtype), second=drafter)
        recipe = self.plan.recipe
        with self.work.progress(f"calibrating {part.name}"):
            made = quantize_drafter(self.modelopt, drafter, lambda: exercise_drafters(bundle, recipe))
        write_drafter(folder, drafter.config, *made)

    def _write_flex(self, part: Part, folder: Path) -> None:
        """Write a FlexDraft head, calibrated with the target that the bundle already holds."""
        head, recipe = load_flex(Path(part.source), self._dtype), self.plan.recipe
        bundle = self._bundle(flex=head)
        with self.work.progress(f"calibrating {part.name}"):
            made = quantize_drafter(self.modelopt, head, lambda: exercise_drafters(bundle, recipe))
        write_flex(folder, head.config, made.tensors, made.description)

    def compare(self, bundle: Bundle) -> dict[str, Any]:
        """Compare the finished bundle with the unquantized one; return figures."""
        drafters = {part.name: self._drafter(part) for part in self.plan.drafters}
        flex = self.plan.flex
        plain = self._bundle(
            first=drafters.get("drafter_first"), second=drafters.get("drafter_second"), target=self.source,
            flex=None if flex is None else load_flex(Path(flex.source), self._dtype),
        )  # fmt: skip
        return compare_fp8(plain, bundle, self.texts(), self.plan.recipe, self.work.progress)

    def _drafter(self, part: Part) -> Drafter:
        assert isinstance(part.config, DrafterConfig)
        return load_drafter(Path(part.source), self._dtype, part.config.role)

    def _bundle(
        self, *, first: Drafter | None = None, second: Drafter | None = None, flex: FlexHead | None = None,
        target: Path | None = None,
    ) -> Bundle:  # fmt: skip
        """A bundle in memory: with the target of the bundle under construction if it is there, else the plain one."""
        made = self.work.bundle / "target"
        model = load_target(target or (made if made.is_dir() else self.source), self._dtype)
        if flex is not None:
            flex.join(model)
        return Bundle(
            path=self.work.bundle,
            manifest=self.plain,
            target=model,
            first=first,
            second=second,
            tokenizer=load_tokenizer(self.source),
            stop_token_ids=stop_tokens(self.source),
            calibration=None,
            flex=flex,
        )

    @property
    def _dtype(self) -> Any:
        return DTYPES[self.plan.recipe.precision]
