"""Can drafters overfit 64 responses? If not, the training has a bug, regardless of its loss.

Trains on 64 short responses to the first prompts of a training recipe, then generates from the same prompts with the
real runtime: tau of `chain` for the first drafter, of `d2sd` for the second after an untrained first one, and of `flex`
for a head must exceed 0.9 of the block. Needs no earlier training, and resumes.

    python benchmarks/overfit.py recipes/train/smollm2-135m.yaml --out build/overfit
    python benchmarks/overfit.py recipes/train/smollm2-135m-flex.yaml --steps 600 --out build/overfit-flex
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import cast

import click

from d2sd.cli.report import Reporting
from d2sd.convert.kinds import KINDS
from d2sd.errors import D2SDError
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.policies import DrafterRole
from d2sd.progress import bar
from d2sd.runtime.evaluation import Evaluation
from d2sd.train.data.features import TrainingData, cache_features
from d2sd.train.dflash import second_drafter
from d2sd.train.dist import Dist
from d2sd.train.kinds import METHODS, trained_kind
from d2sd.train.loop import Trainer
from d2sd.train.pipeline.evaluate import Evaluator, as_written
from d2sd.train.pipeline.models import pinned_target
from d2sd.train.pipeline.responses import ResponseGenerator
from d2sd.train_recipe import SecondSettings, TrainRecipe, load_train_recipe

SEQUENCES = 64
TOKENS = 48  # asked of each: with a block more, what was trained on
GATE = 0.9


def few(recipe: TrainRecipe) -> TrainRecipe:
    """The recipe with half as many prompts again as are needed: some are screened out, some answers are short.

    Greedy and in fp32: in bf16 a batch of another shape rounds otherwise, and half of the answers left what was learnt.
    """
    source = recipe.data.prompts[0].model_copy(update={"count": SEQUENCES + SEQUENCES // 2})
    changed = {"prompts": [source], "self_written": [], "sampled": None, "max_new_tokens": TOKENS + recipe.block_size}
    evaluation = recipe.evaluation.model_copy(update={"prompts": SEQUENCES, "max_new_tokens": TOKENS})
    data = recipe.data.model_copy(update=changed)
    return recipe.model_copy(update={"data": data, "evaluation": evaluation, "precision": "fp32"})


def judge(found: Evaluation, size: int) -> None:
    """Print tau. Raises D2SDError below the gate."""
    click.echo(f"{found.method}: {found.tau:.2f} tokens a step of at most {size}")
    if found.tau <= GATE * size:
        expected = f"above {GATE * size:.2f}"
        raise D2SDError("tau below the gate", where=found.method, found=f"{found.tau:.2f}", expected=expected)


def overfit(
    recipe: TrainRecipe,
    target: Decoder,
    data: TrainingData,
    evaluator: Evaluator,
    train: Callable[[DraftModel, DraftModel | None, DrafterRole], None],
) -> None:
    """Train every drafter of the recipe and judge it; the second after the untrained first."""
    starts: dict[DrafterRole, DraftModel] = {}
    for role, settings in recipe.trained.items():
        before = starts.get(DrafterRole.FIRST)
        if isinstance(settings, SecondSettings) and before is not None:
            start: DraftModel = second_drafter(cast("Drafter", before), settings)
        else:
            start = trained_kind(recipe.shape.kind).start(recipe.shape, target, data, settings.seed)
        starts[role] = start
        drafter = copy.deepcopy(start)
        KINDS[drafter.config.kind].attach(drafter, target)
        train(drafter, before, role)
        drafters = {each: as_written(one, None, evaluator.dtype) for each, one in {**starts, role: drafter}.items()}
        judge(evaluator.evaluate(METHODS[role][-1], drafters), recipe.block_size)


@click.command(cls=Reporting)
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--steps", default=300, show_default=True, help="Steps of each drafter.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(recipe: Path, steps: int, out: Path) -> None:
    """Train the recipe's drafters on 64 responses and generate from the same prompts."""
    loaded = few(load_train_recipe(recipe))
    if loaded.ready_first is not None:
        raise D2SDError("needs a recipe that trains its first drafter", where=recipe)
    folder = out / "target"
    target = (bundle := pinned_target(loaded, folder, bar)).target
    answers = ResponseGenerator(loaded, bundle, out, Dist(), bar, click.echo).all()
    chosen = [answer for answer in answers if len(answer.response_ids) >= TOKENS][:SEQUENCES]
    if len(chosen) < SEQUENCES:
        raise D2SDError("too few responses", where=out, found=len(chosen), expected=f"{SEQUENCES} of {TOKENS} tokens")
    with bar("features", SEQUENCES) as advance:
        layers = loaded.shape.aux_layer_ids(target.config.body.num_layers)
        data = cache_features(target, layers, chosen, out / "features.bf16", advance)
    evaluator = Evaluator(loaded, bundle, chosen, "cpu", bar)

    def train(drafter: DraftModel, first: DraftModel | None, role: DrafterRole) -> None:
        """Over and over the same few sequences; nothing to guard against but failing to learn."""
        settings = loaded.trained[role]
        changed = settings.model_copy(update={"steps": steps, "weight_decay": 0.0, "evaluate_every": steps})
        trainer = Trainer(target, drafter, data, changed, first)
        with bar(role.key, steps) as advance:
            trainer.run(out / role.key, lambda step, metrics: advance(1))

    overfit(loaded, target, data, evaluator, train)


if __name__ == "__main__":
    main()
