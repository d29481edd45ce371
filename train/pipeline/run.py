"""The stages of a training, in order. Each resumes from an earlier run's work and writes the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from d2sd.bundle.load import Bundle, load_bundle
from d2sd.convert.checkpoint.drafter import write_drafter
from d2sd.convert.checkpoint.flex import write_flex
from d2sd.extras import install_line, require_plots
from d2sd.io import check_writable, claim, digest, disk_space
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.policies import DrafterName
from d2sd.progress import Progress
from d2sd.train.data.features import TrainingData, cache_features, online_features
from d2sd.train.data.responses import Response
from d2sd.train.dist import Dist
from d2sd.train.pipeline.drafter import Training
from d2sd.train.pipeline.evaluate import Evaluator, as_written, flex_as_written
from d2sd.train.pipeline.flex import finish_flex, weights_digest
from d2sd.train.pipeline.log import Say, paced, read_log, tensorboard_is_installed
from d2sd.train.pipeline.pair import finish_pair
from d2sd.train.pipeline.ready import check_geometry, load_ready
from d2sd.train.pipeline.responses import ResponseGenerator
from d2sd.train.pipeline.target import pinned_target
from d2sd.train_recipe import FlexSettings, Geometry, TrainRecipe
from d2sd.viz.training import plot_training


@dataclass(frozen=True, slots=True)
class Run:
    """One training of a pair or a FlexDraft head, in one process or several.

    Only the main process writes shared files and prints.
    """

    recipe: TrainRecipe
    work: Path
    out: Path
    dist: Dist
    progress: Progress
    say: Say

    def all(self) -> None:
        """Run all stages: from the prompts to a folder of drafters that a bundle's recipe can name."""
        bundle = self._target()
        check_geometry(self.recipe, bundle.target.config)  # raises D2SDError before hours of work
        parts = {"first": self.recipe.first, "second": self.recipe.second, "flex": self.recipe.flex}
        for name, settings in parts.items():
            if settings is not None:
                self.dist.check(settings.batch, f"{name}.batch")
        if self.dist.is_main:
            self._begin()
        responses = ResponseGenerator(self.recipe, bundle, self.work, self.dist, self.progress, self.say).all()
        bundle = load_bundle(self.work / "target", verify=False)  # reloaded, since the engine repacked the weights
        bundle.target.to(self.dist.device)
        held_out, data = self._features(bundle, responses).split(self.recipe.data.held_out)
        evaluator = Evaluator(self.recipe, bundle, responses[: len(held_out)], self.dist.device, self.progress)
        ready = load_ready(self.recipe).to(self.dist.device) if self.recipe.ready_first else None
        vocabulary = ready.config.draft_vocabulary if ready else self._vocabulary(data, bundle)
        training = Training(
            self.recipe, bundle.target, data, vocabulary, evaluator, self.work, self.dist, self.progress, self.say,
            self._draw_curves,
        )  # fmt: skip
        if self.recipe.flex is not None:
            self._flex(training, self.recipe.flex, evaluator)
            return
        first = ready or training.first()
        self._write("first", first, vocabulary)
        if self.recipe.second is not None:
            self._write("second", training.second(first, self.recipe.second), vocabulary)
        if self.dist.is_main:
            finish_pair(self.recipe, evaluator, self.work, self.out, self.say)
            self._draw_curves()
            self.say(str(self.out))
        self.dist.barrier()

    def _flex(self, training: Training, settings: FlexSettings, evaluator: Evaluator) -> None:
        """Train and write a FlexDraft head; asserts that no bit of the target has changed."""
        before = weights_digest(training.target)
        head = training.flex(settings)
        assert weights_digest(training.target) == before, "training changed the target"
        if self.dist.is_main:
            folder = self.out / "flex"
            folder.mkdir(parents=True, exist_ok=True)
            written = flex_as_written(head, training.vocabulary)
            write_flex(folder, written.config, written.state_dict())
            finish_flex(self.recipe, settings, evaluator, self.work, self.out, before, self.say)
            self._draw_curves()
            self.say(str(self.out))
        self.dist.barrier()

    def _target(self) -> Bundle:
        folder = self.work / "target"
        bundle = pinned_target(self.recipe, folder, self.progress) if self.dist.is_main else None
        self.dist.barrier()
        return bundle or load_bundle(folder, verify=False)

    def _begin(self) -> None:
        # hours before it is written: the output of another training is not replaced
        claim(self.out.resolve(), f"train {self.recipe.name} {digest(self.recipe.model_dump(mode='json'))[:16]}")
        check_writable(self.out / "evaluation.json")
        require_plots()
        if not tensorboard_is_installed():
            self.say(f"TensorBoard is not installed, so no events are written: {install_line('train')}", err=True)

    def _features(self, bundle: Bundle, responses: list[Response]) -> TrainingData:
        aux_layer_ids = self.recipe.aux_layer_ids(bundle.target.config.body.num_layers)
        if self.recipe.data.features == "online":
            return online_features(bundle.target, aux_layer_ids, responses)

        def cached(progress: Callable[[int], None]) -> TrainingData:
            return cache_features(bundle.target, aux_layer_ids, responses, self.work / "features.bf16", progress)

        if self.dist.is_main:
            with self.progress("features", len(responses)) as advance, paced(self.work, "features", 1) as count:
                calls = 0

                def report(sequences: int) -> None:
                    nonlocal calls
                    advance(sequences)
                    count(sequences if calls else 0)  # the first call reports sequences of an earlier run
                    calls += 1

                with disk_space(self.work, 0, "the features"):
                    cached(report)
        self.dist.barrier()
        return cached(lambda sequences: None)

    def _vocabulary(self, data: TrainingData, bundle: Bundle) -> tuple[int, ...] | None:
        """The draft vocabulary: the most frequent ids, ascending, without the mask token."""
        geometry = self.recipe.flex.head if self.recipe.flex is not None else self.recipe.geometry
        count = geometry.draft_vocab_size
        if count is None:
            return None
        size = bundle.target.config.vocab_size
        chosen = data.frequent(count, size)
        if isinstance(geometry, Geometry) and chosen[geometry.mask_token_id]:
            chosen = data.frequent(count + 1, size)
            chosen[geometry.mask_token_id] = False
        return tuple(chosen.nonzero()[:, 0].tolist())

    def _write(self, name: DrafterName, drafter: Drafter, vocabulary: tuple[int, ...] | None) -> None:
        if self.dist.is_main:
            (self.out / name).mkdir(parents=True, exist_ok=True)
            copy = as_written(drafter, vocabulary)
            write_drafter(self.out / name, copy.config, copy.state_dict())

    def _draw_curves(self) -> None:
        names: tuple[DrafterName, ...] = ("first", "second", "flex")
        plot_training([read_log(self.work, name) for name in names], self.out / "curves.png")
