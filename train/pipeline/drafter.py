"""The training of one drafter: initial weights, periodic evaluations, log."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.policies import DrafterName
from d2sd.progress import Progress
from d2sd.train.data.features import TrainingData
from d2sd.train.dist import Dist
from d2sd.train.init_from_target import first_drafter, flex_head
from d2sd.train.loop import Trainer
from d2sd.train.pipeline.evaluate import Evaluator, as_written, flex_as_written
from d2sd.train.pipeline.evaluation import Evaluation
from d2sd.train.pipeline.log import Say, TrainLog, seconds_each
from d2sd.train_recipe import FlexSettings, SecondSettings, TrainRecipe, TrainSettings

Trained = TypeVar("Trained", Drafter, FlexHead)


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

    def first(self) -> Drafter:
        """Train the first drafter, initialised from the target's last layers; evaluated with the policy `chain`."""
        settings = self.recipe.first
        assert settings is not None, "a pretrained first drafter is not trained"
        start = first_drafter(self.recipe.geometry, self.target, self.data, settings.seed)
        drafter = start.to(self.dist.device)

        def evaluate() -> list[Evaluation]:
            return [self.evaluator.evaluate("chain", self._as_written(drafter))]

        return self._train("first", settings, drafter, None, evaluate)

    def second(self, first: Drafter, settings: SecondSettings) -> Drafter:
        """Train the second drafter, initialised from the first; the baseline is a second pass by the first drafter."""
        config = replace(
            first.config, role="variable_prefix", prefix_weight_base=settings.prefix_base, draft_vocabulary=None
        )
        drafter = Drafter(config)
        drafter.load_state_dict(first.state_dict())
        drafter.to(self.dist.device)

        @cache
        def baseline() -> Evaluation:
            return self.evaluator.evaluate("reanchor", self._as_written(first))

        def evaluate() -> list[Evaluation]:
            return [baseline(), self.evaluator.evaluate("d2sd", self._as_written(first), self._as_written(drafter))]

        return self._train("second", settings, drafter, first, evaluate)

    def flex(self, settings: FlexSettings) -> FlexHead:
        """Train a FlexDraft head, initialised from the target's last layers; evaluated with the policy `flex`."""
        head = flex_head(settings.head, self.target, self.data, settings.seed).to(self.dist.device)
        head.join(self.target)

        def evaluate() -> list[Evaluation]:
            written = flex_as_written(head, self.vocabulary, self.evaluator.dtype)
            return [self.evaluator.evaluate("flex", flex=written)]

        return self._train("flex", settings, head, None, evaluate)

    def _as_written(self, drafter: Drafter) -> Drafter:
        return as_written(drafter, self.vocabulary, self.evaluator.dtype)

    def _report(self, name: DrafterName, step: int, steps: int, found: list[Evaluation]) -> None:
        """Print one line per evaluation, also without a terminal, where progress bars are hidden."""
        tau = ", ".join(f"{one.method} {one.tau:.3f}" for one in found)
        _, each, _ = seconds_each(self.work, name)
        left = f", about {(steps - step) * each / 60:.0f} min left" if each and step < steps else ""
        self.say(f"{name} drafter: step {step:,} of {steps:,}, tau {tau}{left}", err=True)

    def _train(
        self, name: DrafterName, settings: TrainSettings, drafter: Trained, first: Drafter | None,
        run_evaluation: Callable[[], list[Evaluation]],
    ) -> Trained:  # fmt: skip
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
        return drafter
