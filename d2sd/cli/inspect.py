"""`d2sd inspect`: what a bundle holds."""

from __future__ import annotations

from pathlib import Path

import click

from d2sd.cli.report import Reporting
from d2sd.progress import bar


@click.command(cls=Reporting)
@click.argument("bundle", type=click.Path(path_type=Path))
def inspect(bundle: Path) -> None:
    """Verify BUNDLE and print its geometry, precision, sizes, row budget and the checks it passed.

    For example:

        d2sd inspect bundles/smollm2-135m
    """
    from d2sd.cli.tables import show_manifest
    from d2sd.convert.bundle.load import verify_files
    from d2sd.manifest import load_manifest

    manifest = load_manifest(bundle)
    verify_files(bundle, manifest, bar)
    show_manifest(bundle, manifest)
