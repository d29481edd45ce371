"""`d2sd triton`: a model repository for Triton Inference Server."""

from __future__ import annotations

from pathlib import Path

import click

from d2sd.cli.options import FilePath, bundle_argument
from d2sd.cli.report import Reporting
from d2sd.serve.triton.parameters import SETTABLE
from d2sd.serve.triton.repository import write_repository


@click.command(cls=Reporting)
@bundle_argument
@click.option("-o", "--out", type=FilePath, required=True, help="Model repository; the model is a folder in it.")
@click.option("--name", help="Name of the model.  [default: the bundle's]")
@click.option("--gpu", "gpus", type=click.IntRange(0), multiple=True, help="GPU of an instance; repeatable.")
@click.option("--batched", is_flag=True, help="Inputs have a leading dimension of 1 (max_batch_size: 1).")
@click.option(
    "--set", "values", multiple=True, metavar="A=B", help=" or ".join(", ".join(SETTABLE).rsplit(", ", 1)) + "."
)
def triton(bundle: Path, out: Path, name: str | None, gpus: list[int], batched: bool, values: tuple[str, ...]) -> None:
    """Write a model repository that serves the bundle at BUNDLE in Triton Inference Server.

    For example:

        d2sd triton bundles/smollm2-135m -o model_repository --set max_batch=8
    """
    click.echo(write_repository(out, bundle, name, values, gpus=gpus, batched=batched))
    click.echo(f"start it: python -m d2sd.serve.triton.run {out}", err=True)
