"""`d2sd build`: recipe -> bundle."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from d2sd.build.plan import make_plan
from d2sd.build.tables import show_plan
from d2sd.cli.options import FilePath, device_option, held_out_option
from d2sd.cli.report import Reporting
from d2sd.progress import bar
from d2sd.recipe import load_recipe


@click.command(cls=Reporting)
@click.argument("recipe", type=FilePath)
@click.option("--plan", is_flag=True, help="Print what would be built, with sizes and memory; read no weights.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override a recipe's value; repeatable.")
@click.option("--pull", "fetch", is_flag=True, help="Fetch what is missing from the Hugging Face hub, as d2sd pull.")
@click.option("--out", type=FilePath, help="Folder of the bundle.  [default: bundles/<name>]")
@click.option("--calibrate", is_flag=True, help="Fit the drafters' confidence like d2sd calibrate, and serve by it.")
@held_out_option
@device_option
@click.option("-v", "--verbose", is_flag=True, help="Print every finished stage and the time, as without a terminal.")
def build(
    recipe: Path, plan: bool, overrides: tuple[str, ...], fetch: bool, out: Path | None,
    calibrate: bool, prompts: tuple[Path, ...], device: str, verbose: bool,
) -> None:  # fmt: skip
    """Build the serving bundle that RECIPE describes.

    A plan needs no more of a checkpoint than its config.json, and of a shipped recipe nothing. An interrupted build
    resumes where it stopped. --prompts and --device are for --calibrate.

    For example:

        d2sd-build recipes/smollm2-135m.yaml --set limits.max_batch=4
    """
    loaded = load_recipe(recipe, overrides)
    output = out or (loaded.path(loaded.output) if loaded.output else Path("bundles") / loaded.name)
    if plan:
        show_plan(make_plan(loaded, weights=False), output)
        return
    if fetch:
        from d2sd.build.hub import pull

        pull(loaded, bar)
    from d2sd.build import pipeline
    from d2sd.train.confidence.fit import fit_of

    fit = fit_of(loaded, prompts, device) if calibrate else None
    start = time.monotonic()

    def finished(stage: str) -> None:
        if verbose or not sys.stderr.isatty():
            click.echo(f"{stage:14} done after {time.monotonic() - start:.1f} s", err=True)

    manifest = pipeline.build(loaded, output, fit=fit, progress=bar, finished=finished)
    if manifest.drafters and manifest.recipe.drafters.calibration is None:
        click.echo(f"not calibrated: `auto` serves its largest tree until d2sd-build {recipe} --calibrate", err=True)
    click.echo(output)
