"""`d2sd pull`: the models that a recipe names on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import click

from d2sd.build.hub import plan_pulls
from d2sd.build.hub import pull as fetch
from d2sd.build.plan import make_plan
from d2sd.build.tables import show_pulls
from d2sd.cli.options import FilePath
from d2sd.cli.report import Reporting
from d2sd.progress import bar
from d2sd.recipe import load_recipe


@click.command(cls=Reporting)
@click.argument("recipe", type=FilePath)
@click.option("--plan", is_flag=True, help="Print what would be fetched, with sizes; write nothing.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override a recipe's value; repeatable.")
def pull(recipe: Path, plan: bool, overrides: tuple[str, ...]) -> None:
    """Fetch the models of RECIPE that it names by repository and revision.

    They go where a build looks for them. A run that was interrupted goes on with the files that are missing. HF_TOKEN
    opens models that need it. Of a model in another layout the converted one is written next to the published one.

    For example:

        d2sd pull qwen3-8b --plan
    """
    loaded = load_recipe(recipe, overrides)
    if plan:
        show_pulls(plan_pulls(loaded))
        return
    folders = fetch(loaded, bar)
    make_plan(loaded, weights=True)  # refuses a geometry or a file that is not the recipe's
    for folder in folders:
        click.echo(folder)
