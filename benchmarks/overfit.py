"""Can both drafters overfit 64 responses? If not, the training has a bug, regardless of its loss.

Trains on 64 short responses to the first prompts of a training recipe, then generates from the same prompts with the
real runtime: tau of `chain` for the first drafter, and of `d2sd` for the second after an untrained first one, must
exceed 0.9 of the block. Needs no earlier training, and resumes.

    python benchmarks/overfit.py recipes/train/smollm2-135m.yaml --out build/overfit
"""

from __future__ import annotations

import copy
from pathlib import Path

import click

from d2sd.bench import metrics
from d2sd.cli.report import Reporting
from d2sd.convert.bundle.load import load_bundle
from d2sd.errors import D2SDError
from d2sd.modeling.drafter import Drafter
from d2sd.policies import PolicyName
from d2sd.progress import bar
from d2sd.train.data.features import cache_features
from d2sd.train.dist import Dist
from d2sd.train.init_from_target import drafter_config, first_drafter
from d2sd.train.loop import Trainer
from d2sd.train.pipeline.evaluate import Evaluator, written
from d2sd.train.pipeline.responses import ResponseGenerator
from d2sd.train.pipeline.target import pinned_target
from d2sd.train_recipe import TrainRecipe, TrainSettings, load_train_recipe

SEQUENCES = 64
TOKENS = 48  # asked of each: with a block more, what was trained on
GATE = 0.9


def few(recipe: TrainRecipe) -> TrainRecipe:
    """The recipe with half as many prompts again as are needed: some are screened out, some answers are short.

    In fp32: in bf16 a batch of another shape rounds otherwise, and half of the answers left what was learnt.
    """
    source = recipe.data.prompts[0].model_copy(update={"count": SEQUENCES + SEQUENCES // 2})
    tokens = TOKENS + recipe.drafter.block_size
    data = recipe.data.model_copy(update={"prompts": [source], "self_written": [], "max_new_tokens": tokens})
    evaluation = recipe.evaluation.model_copy(update={"prompts": SEQUENCES, "max_new_tokens": TOKENS})
    return recipe.model_copy(update={"data": data, "evaluation": evaluation, "precision": "fp32"})


def settings(given: TrainSettings, steps: int) -> TrainSettings:
    """The recipe's, over and over the same few sequences; nothing to guard against but failing to learn."""
    return given.model_copy(update={"steps": steps, "weight_decay": 0.0, "evaluate_every": steps})


def trained(trainer: Trainer, folder: Path, what: str) -> Drafter:
    with bar(what, trainer.settings.steps) as advance:
        trainer.run(folder, lambda step, said: advance(1))
    return trainer.drafter


def judge(evaluator: Evaluator, method: PolicyName, size: int, *drafters: Drafter) -> None:
    """Print tau. Raises D2SDError below the gate."""
    tau = metrics.tau(evaluator.cell(method, *(written(one, None, evaluator.dtype) for one in drafters)))
    click.echo(f"{method}: {tau:.2f} tokens a step of at most {size}")
    if tau <= GATE * size:
        raise D2SDError("tau below the gate", where=method, found=f"{tau:.2f}", expected=f"above {GATE * size:.2f}")


@click.command(cls=Reporting)
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--steps", default=300, show_default=True, help="Steps of each drafter.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(recipe: Path, steps: int, out: Path) -> None:
    """Train both drafters on 64 responses and generate from the same prompts."""
    loaded = few(load_train_recipe(recipe))
    assert loaded.first is not None
    assert loaded.second is not None
    folder = out / "target"
    answers = ResponseGenerator(loaded, pinned_target(loaded, folder, bar), out, Dist(), bar).all()
    chosen = [answer for answer in answers if len(answer.response_ids) >= TOKENS][:SEQUENCES]
    if len(chosen) < SEQUENCES:
        raise D2SDError("too few responses", where=out, found=len(chosen), expected=f"{SEQUENCES} of {TOKENS} tokens")
    bundle = load_bundle(folder, verify=False)  # reloaded, since engines repack weights
    aux_layer_ids = tuple(loaded.drafter.target_layer_ids)
    with bar("features", SEQUENCES) as advance:
        data = cache_features(bundle.target, aux_layer_ids, chosen, out / "features.bf16", advance)
    evaluator = Evaluator(loaded, bundle, chosen, "cpu", bar)
    size = loaded.drafter.block_size

    start = first_drafter(loaded.drafter, bundle.target, data, loaded.first.seed)
    trainer = Trainer(bundle.target, copy.deepcopy(start), data, settings(loaded.first, steps))
    judge(evaluator, "chain", size, trained(trainer, out / "first", "first"))
    second = Drafter(drafter_config(loaded.drafter, bundle.target.config, loaded.second.prefix_base))
    second.load_state_dict(start.state_dict())
    trainer = Trainer(bundle.target, second, data, settings(loaded.second, steps), start)
    judge(evaluator, "d2sd", size, start, trained(trainer, out / "second", "second"))


if __name__ == "__main__":
    main()
