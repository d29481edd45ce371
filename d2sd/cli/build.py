"""`d2sd build`: recipe -> bundle."""

from __future__ import annotations

import time
from pathlib import Path

import click

from d2sd.build import pipeline
from d2sd.build.pipeline import Fit
from d2sd.build.plan import make_plan
from d2sd.build.tables import show_plan
from d2sd.cli.calibrate import PROMPTS, TOKENS
from d2sd.cli.options import FilePath, device_option, held_out_option
from d2sd.cli.report import Reporting
from d2sd.errors import RecipeError
from d2sd.progress import bar
from d2sd.prompts import OWN_PROMPTS, last_prompts
from d2sd.recipe import Recipe, load_recipe
from d2sd.train.confidence import fit as fitting


@click.command(cls=Reporting)
@click.argument("recipe", type=FilePath)
@click.option("--plan", is_flag=True, help="Print what would be built, with sizes and memory; read no weights.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override a recipe's value; repeatable.")
@click.option("--out", type=FilePath, help="Folder of the bundle.  [default: bundles/<name>]")
@click.option(
    "--calibrate", is_flag=True, help="Fit the drafters' confidence, as d2sd calibrate does, and serve by it."
)
@held_out_option
@device_option
@click.option("-v", "--verbose", is_flag=True, help="Print every finished stage and the time.")
def build(
    recipe: Path,
    plan: bool,
    overrides: tuple[str, ...],
    out: Path | None,
    calibrate: bool,
    prompts: tuple[Path, ...],
    device: str,
    verbose: bool,
) -> None:
    """Build the serving bundle that RECIPE describes.

    A plan needs no more of a checkpoint than its config.json, and of a shipped recipe nothing. An interrupted build
    resumes where it stopped. --prompts and --device are for --calibrate.

    For example:

        d2sd build recipes/smollm2-135m.yaml --set limits.max_batch=4
    """
    loaded = load_recipe(recipe, overrides)
    output = out or (loaded.path(loaded.output) if loaded.output else Path("bundles") / loaded.name)
    if plan:
        show_plan(make_plan(loaded, weights=False), output)
        return
    fit = _fit(loaded, prompts, device) if calibrate else None
    start = time.monotonic()

    def finished(stage: str) -> None:
        if verbose:
            click.echo(f"{stage:14} done after {time.monotonic() - start:.1f} s", err=True)

    manifest = pipeline.build(loaded, output, fit=fit, progress=bar, finished=finished)
    if manifest.drafters and manifest.recipe.drafters.calibration is None:
        click.echo(f"not calibrated: `auto` serves its largest tree until d2sd build {recipe} --calibrate", err=True)
    click.echo(output)


def _fit(recipe: Recipe, prompts: tuple[Path, ...], device: str) -> Fit:
    """Raises D2SDError for a recipe that cannot be calibrated, before anything is built."""
    drafters = recipe.drafters
    if drafters.calibration is not None:
        raise RecipeError(
            "The recipe names a calibration, which the build puts into the bundle.",
            where="recipe: drafters.calibration",
            fix="build without --calibrate, or with --set drafters.calibration=null",
        )
    fitting.refuse_uncalibrated(recipe, drafters.sources, Path("recipe"))
    texts = [text for path in prompts or (OWN_PROMPTS,) for text in last_prompts(path, None, PROMPTS)]
    tokens = min(TOKENS, recipe.limits.max_context // 2)
    return Fit(lambda bundle: fitting.calibrate(bundle, texts, tokens, device), [texts, tokens, device])
