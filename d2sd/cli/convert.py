"""`d2sd convert`: a drafter's checkpoint in another format."""

from __future__ import annotations

from pathlib import Path

import click

from d2sd.cli.options import FilePath
from d2sd.cli.report import Reporting
from d2sd.convert.formats.convert import Writable
from d2sd.convert.formats.convert import convert as convert_drafter
from d2sd.modeling.config import Role


@click.command(cls=Reporting)
@click.argument("source", type=FilePath)
@click.option("--to", type=click.Choice(["z-lab", "speculators", "dflash2"]), required=True, help="Format to write.")
@click.option("-o", "--out", type=FilePath, required=True, help="Folder to create.")
@click.option("--target", type=FilePath, help="Target (a folder or a bundle) to check the drafter against.")
@click.option("--role", type=click.Choice(["variable_prefix"]), help="Role of a drafter whose config names none.")
def convert(source: Path, to: Writable, out: Path, target: Path | None, role: Role | None) -> None:
    """Convert the drafter in SOURCE to another checkpoint format.

    SOURCE is a folder in the format of z-lab, ModelOpt, SpecForge or speculators; its config says which.

    A speculators checkpoint holds copies of the target's embedding and head, and dflash2 writes a pair head's products
    with the embedding, so both need --target.

    For example:

        d2sd convert checkpoints/qwen3-8b-speculator --to z-lab -o models/first --target checkpoints/qwen3-8b
    """
    source_format, notes = convert_drafter(source, to, out, target=target, declared=role)
    click.echo(f"read as {source_format}", err=True)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    click.echo(out)
