"""The training of one drafter: where it starts, what it is judged by on its way, and what is written of that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import click

from d2sd.bench import metrics
from d2sd.bench.result import Cell
from d2sd.bench.result import Drafter as Name
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafter import Drafter
from d2sd.progress import Progress
from d2sd.train.data.features import TrainingData
from d2sd.train.dist import Dist
from d2sd.train.init_from_target import first_drafter
from d2sd.train.loop import Trainer
from d2sd.train.pipeline.evaluate import Evaluator, written
from d2sd.train.pipeline.log import TrainLog, seconds_each
from d2sd.train_recipe import SecondSettings, TrainRecipe, TrainSettings


@dataclass(frozen=True, slots=True)
class Training:
    """What the trainings of both drafters share."""

    recipe: TrainRecipe
    target: Decoder  # on the world's device
    data: TrainingData
    vocabulary: tuple[int, ...] | None
    evaluator: Evaluator
    work: Path
    dist: Dist
    progress: Progress
    draw: Callable[[], None]

    def first(self) -> Drafter:
        """Starts from the target's last layers; judged by the chains it drafts."""
        settings = self.recipe.first
        assert settings is not None, "a ready first drafter is not trained"
        start = first_drafter(self.recipe.drafter, self.target, self.data, settings.seed)
        drafter = start.to(self.dist.device)
        return self._train("first", settings, drafter, None, lambda: [self.evaluator.cell("chain", self._now(drafter))])

    def second(self, first: Drafter, settings: SecondSettings) -> Drafter:
        """Starts from the first; judged beside it: once more the first drafter where the second is to draft."""
        config = replace(
            first.config, role="variable_prefix", prefix_weight_base=settings.prefix_base, draft_vocabulary=None
        )
        drafter = Drafter(config)
        drafter.load_state_dict(first.state_dict())
        drafter.to(self.dist.device)

        @cache
        def without() -> Cell:
            return self.evaluator.cell("reanchor", self._now(first))

        def judge() -> list[Cell]:
            return [without(), self.evaluator.cell("d2sd", self._now(first), self._now(drafter))]

        return self._train("second", settings, drafter, first, judge)

    def _now(self, drafter: Drafter) -> Drafter:
        return written(drafter, self.vocabulary, self.evaluator.dtype)

    def _tell(self, name: Name, step: int, steps: int, cells: list[Cell]) -> None:
        """A line an evaluation: bars are for terminals, and this takes hours."""
        tau = ", ".join(f"{cell.method} {metrics.tau(cell):.3f}" for cell in cells)
        _, each, _ = seconds_each(self.work, name)
        left = f", about {(steps - step) * each / 60:.0f} min left" if each and step < steps else ""
        click.echo(f"{name} drafter: step {step:,} of {steps:,}, tau {tau}{left}", err=True)

    def _train(
        self, name: Name, settings: TrainSettings, drafter: Drafter, first: Drafter | None,
        judge: Callable[[], list[Cell]],
    ) -> Drafter:  # fmt: skip
        trainer = Trainer(self.target, drafter, self.data, settings, first, self.dist)
        with (
            self.progress(f"training {name}", settings.steps) as advance,
            closing(TrainLog(self.work, name)) as log,
        ):
            shown = 0

            def report(step: int, said: dict[str, float]) -> None:
                nonlocal shown
                advance(step - shown)  # the first step after a resumption stands for those before it
                shown = step
                log.trained(step, said)

            def evaluate(step: int) -> None:
                if self.dist.is_main:
                    cells = judge()
                    log.evaluated(step, cells)
                    self.draw()
                    self._tell(name, step, settings.steps, cells)
                    log.rest()
                self.dist.barrier()

            trainer.run(self.work / name, report, evaluate)
            advance(settings.steps - shown)  # all of them, where an earlier run had finished
        return drafter
