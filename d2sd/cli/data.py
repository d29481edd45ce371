"""`d2sd data`: fill `data/` with the public prompt sets, or print their sources."""

from __future__ import annotations

from pathlib import Path

import click

from d2sd.cli.report import Reporting


@click.command(cls=Reporting)
@click.option("--from", "source", type=click.Path(path_type=Path), help="Folder with the sets, in eval/ and train/.")
@click.option("--to", type=click.Path(path_type=Path), default=Path("data"), show_default=True, help="Folder to fill.")
def data(source: Path | None, to: Path) -> None:
    """Fill a folder with the prompt sets that recipes and benchmarks name, and print the sources of missing ones.

    Nothing is downloaded. Every file is checked by its hash. Demo, build and tests do not need the sets.

    For example:

        d2sd data --from ../prompts
    """
    from d2sd.prompt_sets import fill, present, prompt_sets

    if source is not None:
        fill(to, source)
    found = present(to)
    for wanted in prompt_sets():
        if wanted.file in found:
            click.echo(f"{to / wanted.file}: {wanted.prompts:,} prompts, {wanted.license}")
            continue
        click.echo(f"{to / wanted.file}: missing; {wanted.prompts:,} prompts, {wanted.license}")
        for label in ("source", "made", "sha256"):
            click.echo(f"  {label:7} {getattr(wanted, label)}")
