"""`d2sd data`: fill `data/` with the public prompt sets, or say where they come from."""

from __future__ import annotations

from pathlib import Path

import click

from d2sd.cli.options import FilePath
from d2sd.cli.report import Reporting
from d2sd.prompt_sets import fill, present, prompt_sets


@click.command(cls=Reporting)
@click.option("--from", "source", type=FilePath, help="Folder with the sets, in eval/ and train/.")
@click.option("--to", type=FilePath, default=Path("data"), show_default=True, help="Folder to fill.")
def data(source: Path | None, to: Path) -> None:
    """Fill data/ with the prompt sets that recipes and benchmarks name.

    For sets that are missing, prints their public source. Nothing is downloaded; every file is checked by its hash.
    Demo, build and tests do without the sets. In a checkout, make data REPOSITORIES=FOLDER makes them of clones of
    those sources.

    For example:

        d2sd data --from ../prompts
    """
    if source is not None:
        fill(to, source)
    files = present(to)
    for prompt_set in prompt_sets():
        told = f"{prompt_set.prompts:,} {prompt_set.kind}, {prompt_set.license}"
        labels = () if prompt_set.file in files else ("source", "made", "sha256")
        click.echo(f"{to / prompt_set.file}: {'missing; ' if labels else ''}{told}")
        for label in labels:
            click.echo(f"  {label:7} {getattr(prompt_set, label)}")
