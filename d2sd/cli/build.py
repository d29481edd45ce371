"""`d2sd build`: recipe -> bundle."""

from __future__ import annotations

import time
from pathlib import Path

import click

from d2sd.build import pipeline
from d2sd.build.plan import make_plan
from d2sd.build.tables import show_plan
from d2sd.cli.options import FilePath
from d2sd.cli.report import Reporting
from d2sd.progress import bar
from d2sd.recipe import load_recipe


@click.command(cls=Reporting)
@click.argument("recipe", type=FilePath)
@click.option("--plan", is_flag=True, help="Print what would be built, with sizes and memory; read no weights.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override a recipe's value; repeatable.")
@click.option("--out", type=FilePath, help="Folder of the bundle.  [default: bundles/<name>]")
@click.option("-v", "--verbose", is_flag=True, help="Print every finished stage and the time.")
def build(recipe: Path, plan: bool, overrides: tuple[str, ...], out: Path | None, verbose: bool) -> None:
    """Build the serving bundle that RECIPE describes.

    A plan needs no more of a checkpoint than its config.json, and of a shipped recipe nothing. An interrupted build
    resumes where it stopped.

    For example:

        d2sd build recipes/smollm2-135m.yaml --set limits.max_batch=4
    """
    loaded = load_recipe(recipe, overrides)
    output = out or (loaded.path(loaded.output) if loaded.output else Path("bundles") / loaded.name)
    if plan:
        show_plan(make_plan(loaded, weights=False), output)
        return
    start = time.monotonic()

    def finished(stage: str) -> None:
        if verbose:
            click.echo(f"{stage:14} done after {time.monotonic() - start:.1f} s", err=True)

    pipeline.build(loaded, output, progress=bar, finished=finished)
    click.echo(output)
