"""`d2sd inspect`: the verified contents of a bundle."""

from __future__ import annotations

from pathlib import Path

import click

from d2sd.bundle.contents import show_manifest
from d2sd.bundle.files import verify_files
from d2sd.cli.options import bundle_argument
from d2sd.cli.report import Reporting
from d2sd.manifest import load_manifest
from d2sd.progress import bar


@click.command(cls=Reporting)
@bundle_argument
def inspect(bundle: Path) -> None:
    """Verify BUNDLE and print what it holds.

    That is geometry, precision, sizes, row budget and the checks that its build passed.

    For example:

        d2sd inspect bundles/smollm2-135m
    """
    manifest = load_manifest(bundle)
    verify_files(bundle, manifest, bar)
    show_manifest(bundle, manifest)
