"""`d2sd convert`: a drafter's checkpoint in another format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from d2sd.cli.report import Reporting

if TYPE_CHECKING:
    from d2sd.convert.formats.write import Writable
    from d2sd.modeling.config import Role


@click.command(cls=Reporting)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(["z-lab", "speculators"]), required=True, help="Format to write.")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Folder to make.")
@click.option(
    "--target", type=click.Path(path_type=Path), help="Target (a folder or a bundle) to hold the drafter against."
)
@click.option("--role", type=click.Choice(["variable_prefix"]), help="Role of a drafter that does not say its own.")
def convert(source: Path, to: Writable, out: Path, target: Path | None, role: Role | None) -> None:
    """Convert the drafter in SOURCE, a folder of z-lab, ModelOpt, SpecForge or speculators, told from its config.

    A speculators checkpoint holds copies of the target's embedding and head, so writing one needs --target.

    For example:

        d2sd convert checkpoints/qwen3-8b-speculator --to z-lab -o models/first --target checkpoints/qwen3-8b
    """
    from d2sd.convert.formats.convert import convert as convert_drafter

    found, notes = convert_drafter(source, to, out, target=target, declared=role)
    click.echo(f"read as {found}", err=True)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    click.echo(out)
