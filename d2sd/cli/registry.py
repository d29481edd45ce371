"""`d2sd push` and `d2sd pull`: bundles as artifacts in an OCI registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from d2sd.bundle.registry.pull import pull as pull_bundle
from d2sd.bundle.registry.push import push as push_bundle
from d2sd.cli.options import FilePath, bundle_argument
from d2sd.cli.report import Reporting
from d2sd.progress import bar

_plain_http = click.option("--plain-http", is_flag=True, help="Without TLS; loopback addresses need no flag.")


@click.command(cls=Reporting)
@bundle_argument
@click.argument("reference")
@_plain_http
@click.option("--sign-command", help="Run with HOST/NAME@DIGEST as last argument, before the tag is set.")
def push(bundle: Path, reference: str, **options: Any) -> None:
    """Push BUNDLE to a registry as the OCI artifact REFERENCE, and print its digest.

    For example:

        d2sd push bundles/smollm2-135m registry.example.com/models/smollm2-135m:1
    """
    click.echo(push_bundle(bundle, reference, progress=bar, **options))


@click.command(cls=Reporting)
@click.argument("reference")
@click.option("-o", "--out", type=FilePath, required=True, help="Folder of the bundle; an older bundle is replaced.")
@_plain_http
@click.option("--verify-command", help="Run with HOST/NAME@DIGEST as last argument; another status than 0 refuses.")
def pull(reference: str, out: Path, **options: Any) -> None:
    """Pull the bundle REFERENCE, HOST/NAME:TAG or HOST/NAME@DIGEST, from a registry.

    For example:

        d2sd pull registry.example.com/models/smollm2-135m:1 --out bundles/smollm2-135m
    """
    click.echo(pull_bundle(reference, out, progress=bar, **options))
