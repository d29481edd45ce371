"""`d2sd train`: the drafters a training recipe names, stage by stage, each resumable."""

from __future__ import annotations

from pathlib import Path

import click

from d2sd.cli.options import FilePath
from d2sd.cli.report import Reporting
from d2sd.progress import bar, silent
from d2sd.train.dist import Dist
from d2sd.train.pipeline.plan import plan as plan_stages
from d2sd.train.pipeline.run import Run
from d2sd.train_recipe import load_train_recipe


@click.command(cls=Reporting)
@click.argument("recipe", type=FilePath)
@click.option("--work", type=FilePath, help="Folder of intermediate files and logs.  [default: training/<name>]")
@click.option(
    "--out", type=FilePath, required=True, help="Folder of the trained pair: an empty one, or this recipe's own."
)
@click.option(
    "--only",
    type=click.Choice(["answers", "drafters"]),
    help="answers: write the target's responses, also in several processes on one GPU. drafters: train with those there"
    " are, without evaluation and calibration, which a run without --only adds.",
)
@click.option("--plan", is_flag=True, help="Print the stages, their progress, sizes and times; do nothing.")
def train(recipe: Path, work: Path | None, out: Path, only: str | None, plan: bool) -> None:
    """Train the drafters that RECIPE names.

    The stages are responses of the target, their features, first drafter, second drafter, evaluation. An interrupted
    run resumes where it stopped. On several GPUs: torchrun --nproc-per-node 8 --no-python d2sd train ...

    For example:

        d2sd train recipes/train/smollm2-135m.yaml --out build/pair
    """
    loaded = load_train_recipe(recipe)
    work = work or Path("training") / loaded.name
    if plan:
        for stage, state in plan_stages(loaded, work, out):
            click.echo(f"{stage:16}{state}")
        return
    dist = Dist.init()
    try:
        run = Run(loaded, work, out, dist, bar if dist.is_main else silent, click.echo)
        {None: run.all, "answers": run.answers, "drafters": run.drafters}[only]()
    finally:
        dist.destroy()
