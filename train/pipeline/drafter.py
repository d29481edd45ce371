"""The training of one drafter: initial weights, periodic evaluations, log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from d2sd.convert.kinds import KINDS
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.policies import FACTS, DrafterName, DrafterRole, PolicyName
from d2sd.progress import Progress
from d2sd.runtime.evaluation import Evaluation
from d2sd.train.data.features import TrainingData
from d2sd.train.dflash import second_drafter
from d2sd.train.dist import Dist
from d2sd.train.kinds import METHODS, TRAINED
from d2sd.train.loop import Trainer
from d2sd.train.pipeline.evaluate import Evaluator, as_written
from d2sd.train.pipeline.log import Say, TrainLog, seconds_each
from d2sd.train_recipe import SecondSettings, TrainRecipe, TrainSettings


@dataclass(frozen=True, slots=True)
class Training:
    """Context shared by the trainings of all drafters."""

    recipe: TrainRecipe
    target: Decoder  # on `dist.device`
    data: TrainingData
    vocabulary: tuple[int, ...] | None
    evaluator: Evaluator
    work: Path
    dist: Dist
    progress: Progress
    say: Say
    draw_curves: Callable[[], None]

    def train(self, role: DrafterRole, settings: TrainSettings, before: Mapping[DrafterRole, DraftModel]) -> DraftModel:
        """Train the drafter of a place, after those `before` it: from the target, or, on prefixes, from the first."""
        first = cast("Drafter", before[DrafterRole.FIRST]) if isinstance(settings, SecondSettings) else None
        if isinstance(settings, SecondSettings) and first is not None:
            drafter: DraftModel = second_drafter(first, settings)
        else:
            drafter = TRAINED[role].start(self.recipe.shape, self.target, self.data, settings.seed)
        KINDS[role].attach(drafter.to(self.dist.device), self.target)
        drafters = {**before, role: drafter}

        def evaluated(method: PolicyName) -> Evaluation:
            used = {each: drafters[each] for each in FACTS[method].drafters}
            dtype = self.evaluator.dtype
            written = {each: as_written(one, self.vocabulary, dtype) for each, one in used.items()}
            return self.evaluator.evaluate(method, written)

        baseline = cache(evaluated)

        def evaluate() -> list[Evaluation]:
            return [(evaluated if role in FACTS[name].drafters else baseline)(name) for name in METHODS[role]]

        self._train(role.key, settings, drafter, first, evaluate)
        return drafter

    def _report(self, name: DrafterName, step: int, steps: int, found: list[Evaluation]) -> None:
        """Print one line per evaluation, also without a terminal, where progress bars are hidden."""
        tau = ", ".join(f"{one.method} {one.tau:.3f}" for one in found)
        _, each, _ = seconds_each(self.work, name)
        left = f", about {(steps - step) * each / 60:.0f} min left" if each and step < steps else ""
        self.say(f"{name} drafter: step {step:,} of {steps:,}, tau {tau}{left}", err=True)

    def _train(
        self, name: DrafterName, settings: TrainSettings, drafter: DraftModel, first: Drafter | None,
        run_evaluation: Callable[[], list[Evaluation]],
    ) -> None:  # fmt: skip
        trainer = Trainer(self.target, drafter, self.data, settings, first, self.dist)
        with (
            self.progress(f"training {name}", settings.steps) as advance,
            closing(TrainLog(self.work, name)) as log,
        ):
            shown = 0

            def report(step: int, metrics: dict[str, float]) -> None:
                nonlocal shown
                advance(step - shown)  # the first report after a resume includes the earlier steps
                shown = step
                log.add_step(step, metrics)

            def evaluate(step: int) -> None:
                if self.dist.is_main:
                    found = run_evaluation()
                    log.add_evaluation(step, found)
                    self.draw_curves()
                    self._report(name, step, settings.steps, found)
                    log.restart_clock()
                self.dist.barrier()

            trainer.run(self.work / name, report, evaluate)
            advance(settings.steps - shown)  # all steps if an earlier run had finished
