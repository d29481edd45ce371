"""`d2sd train`: the drafters a training recipe names, stage by stage, each resumable."""

from __future__ import annotations

from pathlib import Path

import click

from d2sd.cli.report import Reporting
from d2sd.progress import bar


@click.command(cls=Reporting)
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    help="Folder of answers, features, logs and states.  [default: training/<name>]",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder that gets the trained pair.")
@click.option("--plan", is_flag=True, help="Print the stages, what is done of them, sizes and times; do nothing.")
def train(recipe: Path, work: Path | None, out: Path, plan: bool) -> None:
    """Train the drafters that RECIPE names: answers by the target, features, first drafter, second drafter, evaluation.

    Interrupted, it goes on where it stopped. On several GPUs: torchrun --nproc-per-node 8 --no-python d2sd train ...

    For example:

        d2sd train recipes/train/smollm2-135m.yaml --out models/smollm2-135m
    """
    from d2sd.train_recipe import load_train_recipe

    loaded = load_train_recipe(recipe)
    work = work or Path("training") / loaded.name
    if plan:
        from d2sd.train.pipeline.plan import plan as stages

        for stage, state in stages(loaded, work, out):
            click.echo(f"{stage:16}{state}")
        return
    from d2sd.progress import silent
    from d2sd.train.dist import Dist
    from d2sd.train.pipeline.run import Run

    dist = Dist.init()
    try:
        Run(loaded, work, out, dist, bar if dist.is_main else silent, click.echo).all()
    finally:
        dist.destroy()
