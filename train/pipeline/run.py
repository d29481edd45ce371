"""The stages of a training, in order. Each resumes from an earlier run's work and writes the same bytes."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import torch

from d2sd.build.sources import obtained
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.calibration import NAME as CALIBRATION
from d2sd.convert.kinds import DFLASH, KINDS
from d2sd.extras import require_plots
from d2sd.io import check_writable, claim, digest, disk_space, exclusive
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.head_configs import PairConfig
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.policies import DRAFTER_NAMES, FACTS, DrafterName, DrafterRole, PolicyName
from d2sd.progress import Progress
from d2sd.runtime.evaluation import Evaluation
from d2sd.train.data.features import TrainingData, cache_features, device_features, online_features
from d2sd.train.data.responses import Response
from d2sd.train.dflash import second_drafter
from d2sd.train.dist import Dist
from d2sd.train.kinds import METHODS, trained_kind
from d2sd.train.loop import Trainer
from d2sd.train.pair_head import PairTrainer, with_pair_head
from d2sd.train.pipeline.evaluate import Evaluator, as_written
from d2sd.train.pipeline.finish import finish, weights_digest
from d2sd.train.pipeline.log import Say, TrainLog, paced, read_log, seconds_each
from d2sd.train.pipeline.models import check_geometry, load_start, pinned_target
from d2sd.train.pipeline.responses import ResponseGenerator
from d2sd.train.rejections import keep, kept, kept_steps, matched
from d2sd.train_recipe import (
    FirstSettings,
    Geometry,
    Objective,
    PairSettings,
    SecondSettings,
    TrainRecipe,
    TrainSettings,
)
from d2sd.viz.training import plot_training


@dataclass(frozen=True, slots=True)
class Run:
    """One training of all drafters of a recipe, in one process or several.

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
        with self._locked():
            self._stages()

    def answers(self) -> None:
        """Write the responses alone. More processes may share a GPU for it than for the other stages."""
        with self._locked():
            self._responses(self._target()).write()

    def drafters(self) -> None:
        """Train with the responses there are, and leave the evaluation and the calibration to a later run."""
        with self._locked():
            self._stages(alone=True)

    def _locked(self) -> AbstractContextManager[object]:
        return exclusive(self.work / "lock", wait=False) if self.dist.is_main else nullcontext()

    def _responses(self, bundle: Bundle) -> ResponseGenerator:
        return ResponseGenerator(self.recipe, bundle, self.work, self.dist, self.progress, self.say)

    def _stages(self, *, alone: bool = False) -> None:
        bundle = self._target()
        check_geometry(self.recipe, bundle.target.config)  # raises D2SDError before hours of work
        for role, settings in self.recipe.trained.items():
            self.dist.check(settings.batch, f"{role.key}.batch")
        if self.dist.is_main:
            self._begin()
        maker = self._responses(bundle)
        responses = maker.written() if alone else maker.all()
        del maker  # and its engine
        bundle.target.to(self.dist.device)
        held_out, data = self._features(bundle, responses).split(self.recipe.data.held_out)
        unseen = data
        if self.recipe.head is not None and self.recipe.head.unseen is not None:
            unseen, data = data.split(self.recipe.head.unseen, "head.unseen")
        evaluator = Evaluator(self.recipe, bundle, responses[: len(held_out)], self.dist.device, self.progress)
        drafters: dict[DrafterRole, DraftModel] = {}
        for role, source in self.recipe.ready.items():  # in fp32, without gradients
            drafters[role] = DFLASH.load(obtained(self.recipe, source), torch.float32).to(self.dist.device)
            KINDS[drafters[role].config.kind].attach(drafters[role], bundle.target)
            self._write(role, drafters[role], drafters[role].config.draft_vocabulary)
        ready = drafters.get(DrafterRole.FIRST)
        vocabulary = ready.config.draft_vocabulary if ready else self._vocabulary(data, bundle)
        training = Training(self, bundle.target, held_out, data, vocabulary, None if alone else evaluator)
        before = weights_digest(bundle.target)
        for role, settings in self.recipe.trained.items():
            drafters[role] = training.train(role, settings, drafters)
            self._write(role, drafters[role], vocabulary)
        if self.recipe.head is not None and self.dist.is_main:
            for role in drafters:
                drafters[role] = training.train_head(role, self.recipe.head, drafters, unseen)
                self._write(role, drafters[role], drafters[role].config.draft_vocabulary)
        assert weights_digest(bundle.target) == before, "training changed the target"
        if self.dist.is_main and not alone:
            finish(self.recipe, evaluator, drafters.keys(), self.work, self.out, before, self.say)
            self.draw_curves()
            self.say(self._next(drafters.keys()), err=True)
            self.say(str(self.out))
        self.dist.barrier()

    def _next(self, roles: Collection[DrafterRole]) -> str:
        """The lines of a recipe that name the trained drafters, and the command that reads it."""
        places = {role.key: self.out / role.key for role in roles} | {"calibration": self.out / CALIBRATION}
        lines = [f"  {place}: {{path: {json.dumps(str(path.resolve()))}}}" for place, path in places.items()]
        return "\n".join(["serve them: d2sd-build RECIPE, with these lines in it", "drafters:", *lines])

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

    def _features(self, bundle: Bundle, responses: list[Response]) -> TrainingData:
        aux_layer_ids = self.recipe.shape.aux_layer_ids(bundle.target.config.body.num_layers)
        if self.recipe.data.features == "online":
            return online_features(bundle.target, aux_layer_ids, responses)
        if self.recipe.data.features == "device":
            gc.collect()  # the engine that wrote the responses, and its pages
            torch.cuda.empty_cache()
            with self.progress("features", len(responses)) as advance:
                return device_features(bundle.target, aux_layer_ids, responses, advance)

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
        """The draft vocabulary, ascending: that of the first drafter to start from, chosen of more responses, if it has
        the recipe's size; or else the most frequent ids without the mask token.
        """
        geometry = self.recipe.shape
        count = geometry.draft_vocab_size
        if count is None:
            return None
        if (start := self.recipe.starts.get(DrafterRole.FIRST)) is not None:
            known = DFLASH.read_config(obtained(self.recipe, start)).draft_vocabulary
            if known is not None and len(known) == count:
                return known
        size = bundle.target.config.vocab_size
        chosen = data.frequent(count, size)
        if isinstance(geometry, Geometry) and chosen[geometry.mask_token_id]:
            chosen = data.frequent(count + 1, size)
            chosen[geometry.mask_token_id] = False
        return tuple(chosen.nonzero()[:, 0].tolist())

    def _write(self, role: DrafterRole, drafter: DraftModel, vocabulary: tuple[int, ...] | None) -> None:
        if self.dist.is_main:
            folder = self.out / role.key
            folder.mkdir(parents=True, exist_ok=True)
            copy = as_written(drafter, vocabulary)
            KINDS[copy.config.kind].write(folder, copy.config, copy.state_dict())

    def draw_curves(self) -> None:
        """Draw the curves of all drafters that have been trained so far."""
        plot_training([read_log(self.work, name) for name in DRAFTER_NAMES], self.out / "curves.png")


@dataclass(frozen=True, slots=True)
class Training:
    """Context shared by the trainings of all drafters."""

    run: Run
    target: Decoder  # on `run.dist.device`
    held_out: TrainingData
    data: TrainingData
    vocabulary: tuple[int, ...] | None
    evaluator: Evaluator | None  # None: drafters are not evaluated

    def train(self, role: DrafterRole, settings: TrainSettings, before: Mapping[DrafterRole, DraftModel]) -> DraftModel:
        """Train the drafter of a place, after those `before` it: from the target, or, on prefixes, from the first."""
        first = cast("Drafter", before[DrafterRole.FIRST]) if isinstance(settings, SecondSettings) else None
        if role in self.run.recipe.starts:
            drafter: DraftModel = load_start(self.run.recipe, role)
        elif isinstance(settings, SecondSettings) and first is not None:
            drafter = second_drafter(first, settings)
        else:
            shape = self.run.recipe.shape
            drafter = trained_kind(shape.kind).start(shape, self.target, self.data, settings.seed)
        KINDS[drafter.config.kind].attach(drafter.to(self.run.dist.device), self.target)
        drafters = {**before, role: drafter}

        evaluator = self.evaluator

        def evaluated(method: PolicyName) -> Evaluation:
            assert evaluator is not None
            used = {each: drafters[each] for each in FACTS[method].drafters}
            written = {each: as_written(drafter, self.vocabulary, evaluator.dtype) for each, drafter in used.items()}
            return evaluator.evaluate(method, written)

        baseline = cache(evaluated)

        def evaluate() -> list[Evaluation]:
            return [(evaluated if role in FACTS[name].drafters else baseline)(name) for name in METHODS[role]]

        rejecting = None
        if first is not None:
            assert isinstance(settings, SecondSettings)
            rejecting = first if settings.rejections == "final" else self._matched(first, settings)
        self._train(role.key, settings, drafter, rejecting, evaluate)
        return drafter

    def train_head(
        self, role: DrafterRole, settings: PairSettings, drafters: Mapping[DrafterRole, DraftModel], data: TrainingData
    ) -> Drafter:
        """The drafter of a place with a pair head that is trained; a second one's on the rejections of the first."""
        first, plain = (cast("Drafter", drafters[each]) for each in (DrafterRole.FIRST, role))
        is_second = role is DrafterRole.SECOND
        prefixes = self.run.recipe.second or SecondSettings(steps=1, objective=Objective(ce=1))
        vocabulary = plain.config.draft_vocabulary if role in self.run.recipe.ready else self.vocabulary
        config = PairConfig(settings.rank, settings.candidates)
        begun = self.run.recipe.starts.get(role)
        start = None if begun is None else DFLASH.load(obtained(self.run.recipe, begun), torch.float32)
        generator = torch.Generator().manual_seed(settings.seed + role)
        drafter = with_pair_head(plain, config, vocabulary, generator, start)
        of_second = (first, prefixes) if is_second else (None, None)
        trainer = PairTrainer(self.target, drafter, data, settings, *of_second)
        with self.run.progress(f"training the {role.key} head", settings.steps) as advance:
            shown = 0

            def report(step: int, _metrics: dict[str, float]) -> None:
                nonlocal shown
                advance(step - shown)
                shown = step

            trainer.run(self.run.work / f"{role.key}-head", report)
            advance(settings.steps - shown)
        DFLASH.attach(drafter, self.target)
        told = trainer.figures(self.held_out)
        self.run.say(
            f"{role.key} head: of held-out slots behind the right token {told['right']:.1%} are right, "
            f"{told['right without']:.1%} without it; {told['recall']:.1%} are candidates, "
            f"{told['rest']:.1%} is left to others; {told['nats']:.3f} nats, {told['nats without']:.3f} without it",
            err=True,
        )
        return drafter

    def _matched(self, first: Drafter, settings: SecondSettings) -> Drafter:
        role, trained = DrafterRole.FIRST, self.run.recipe.first
        assert trained is not None, "validated"
        earlier = kept(self.run.work / role.key, trained.steps, first)
        for drafter in earlier.values():
            DFLASH.attach(drafter, self.target)
        found, line = matched(first, earlier, self.target, self.held_out, self.data, settings)
        if self.run.dist.is_main:
            self.run.say(line, err=True)
        return found

    def _report(self, name: DrafterName, step: int, steps: int, evaluations: list[Evaluation]) -> None:
        """Print one line per evaluation, also without a terminal, where progress bars are hidden."""
        tau = ", ".join(f"{evaluation.method} {evaluation.tau:.3f}" for evaluation in evaluations)
        _, each, _ = seconds_each(self.run.work, name)
        left = f", about {(steps - step) * each / 60:.0f} min left" if each and step < steps else ""
        self.run.say(f"{name} drafter: step {step:,} of {steps:,}, tau {tau}{left}", err=True)

    def _train(
        self,
        name: DrafterName,
        settings: TrainSettings,
        drafter: DraftModel,
        first: Drafter | None,
        run_evaluation: Callable[[], list[Evaluation]],
    ) -> None:
        trainer = Trainer(self.target, drafter, self.data, settings, first, self.run.dist)
        log = TrainLog(self.run.work, name)
        second = self.run.recipe.second
        kept_for = second is not None and second.rejections == "matched" and isinstance(settings, FirstSettings)
        kept_at = kept_steps(settings.steps) if kept_for else set[int]()
        with self.run.progress(f"training {name}", settings.steps) as advance:
            shown, passed = 0, 0.0

            def report(step: int, metrics: dict[str, float]) -> None:
                nonlocal shown, passed
                advance(step - shown)  # the first report after a resume includes the earlier steps
                log.add_step(step, metrics)
                due = [at for at in kept_at if max(step - 1, passed) < at <= trainer.reached]
                if due:
                    keep(self.run.work / name, max(due), drafter)
                shown, passed = step, trainer.reached

            def evaluate(step: int) -> None:
                if self.run.dist.is_main:
                    evaluations = run_evaluation()
                    log.add_evaluation(step, evaluations)
                    self.run.draw_curves()
                    self._report(name, step, settings.steps, evaluations)
                    log.restart_clock()
                self.run.dist.barrier()

            trainer.run(self.run.work / name, report, evaluate if self.evaluator is not None else None)
            advance(settings.steps - shown)  # all steps if an earlier run had finished
