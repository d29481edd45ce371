"""Can drafters, or a FlexDraft head, overfit 64 responses? If not, the training has a bug, regardless of its loss.

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
from typing import TypeVar

import click

from d2sd.bundle.load import load_bundle
from d2sd.cli.report import Reporting
from d2sd.errors import D2SDError
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.progress import bar
from d2sd.train.data.features import TrainingData, cache_features
from d2sd.train.dist import Dist
from d2sd.train.init_from_target import drafter_config, first_drafter, flex_head
from d2sd.train.loop import Trainer
from d2sd.train.pipeline.evaluate import Evaluator, as_written, flex_as_written
from d2sd.train.pipeline.evaluation import Evaluation
from d2sd.train.pipeline.responses import ResponseGenerator
from d2sd.train.pipeline.target import pinned_target
from d2sd.train_recipe import FlexSettings, SecondSettings, TrainRecipe, TrainSettings, load_train_recipe

SEQUENCES = 64
TOKENS = 48  # asked of each: with a block more, what was trained on
GATE = 0.9

Trained = TypeVar("Trained", Drafter, FlexHead)
#: train(drafter, settings, first, name) -> the drafter, trained.
Train = Callable[[Trained, TrainSettings, "Drafter | None", str], Trained]


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


def overfit_pair(
    recipe: TrainRecipe, settings: TrainSettings, second_settings: SecondSettings, target: Decoder, data: TrainingData,
    evaluator: Evaluator, train: Train[Drafter],
) -> None:  # fmt: skip
    start = first_drafter(recipe.geometry, target, data, settings.seed)
    first = train(copy.deepcopy(start), settings, None, "first")
    judge(evaluator.evaluate("chain", as_written(first, None, evaluator.dtype)), recipe.block_size)
    second = Drafter(drafter_config(recipe.geometry, target.config, second_settings.prefix_base))
    second.load_state_dict(start.state_dict())
    train(second, second_settings, start, "second")
    one, two = (as_written(drafter, None, evaluator.dtype) for drafter in (start, second))
    judge(evaluator.evaluate("d2sd", one, two), recipe.block_size)


def overfit_flex(
    settings: FlexSettings, target: Decoder, data: TrainingData, evaluator: Evaluator, train: Train[FlexHead]
) -> None:
    head = flex_head(settings.head, target, data, settings.seed)
    head.join(target)
    train(head, settings, None, "flex")
    judge(evaluator.evaluate("flex", flex=flex_as_written(head, None, evaluator.dtype)), settings.head.block_size)


@click.command(cls=Reporting)
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--steps", default=300, show_default=True, help="Steps of each drafter.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(recipe: Path, steps: int, out: Path) -> None:
    """Train the recipe's drafters on 64 responses and generate from the same prompts."""
    loaded = few(load_train_recipe(recipe))
    folder = out / "target"
    answers = ResponseGenerator(loaded, pinned_target(loaded, folder, bar), out, Dist(), bar, click.echo).all()
    chosen = [answer for answer in answers if len(answer.response_ids) >= TOKENS][:SEQUENCES]
    if len(chosen) < SEQUENCES:
        raise D2SDError("too few responses", where=out, found=len(chosen), expected=f"{SEQUENCES} of {TOKENS} tokens")
    target = (bundle := load_bundle(folder, verify=False)).target  # reloaded, since engines repack weights
    with bar("features", SEQUENCES) as advance:
        layers = loaded.aux_layer_ids(target.config.body.num_layers)
        data = cache_features(target, layers, chosen, out / "features.bf16", advance)
    evaluator = Evaluator(loaded, bundle, chosen, "cpu", bar)

    def train(drafter: Trained, settings: TrainSettings, first: Drafter | None, name: str) -> Trained:
        """Over and over the same few sequences; nothing to guard against but failing to learn."""
        changed = settings.model_copy(update={"steps": steps, "weight_decay": 0.0, "evaluate_every": steps})
        trainer = Trainer(target, drafter, data, changed, first)
        with bar(name, steps) as advance:
            trainer.run(out / name, lambda step, metrics: advance(1))
        return drafter

    if loaded.flex is not None:
        overfit_flex(loaded.flex, target, data, evaluator, train)
    elif loaded.first is None or loaded.second is None:
        raise D2SDError("needs a recipe that trains both drafters, or flex", where=recipe)
    else:
        overfit_pair(loaded, loaded.first, loaded.second, target, data, evaluator, train)


if __name__ == "__main__":
    main()
