"""`d2sd triton`: a model repository for Triton Inference Server."""

from __future__ import annotations

from pathlib import Path

import click

from d2sd.cli.options import FilePath, backend_option, bundle_argument, policy_option
from d2sd.cli.report import Reporting
from d2sd.convert.bundle.backends import BackendName
from d2sd.manifest import load_manifest
from d2sd.recipe import Policy
from d2sd.serve.triton.parameters import Parameters
from d2sd.serve.triton.repository import write_repository


@click.command(cls=Reporting)
@bundle_argument
@click.option("-o", "--out", type=FilePath, required=True, help="Model repository; the model is a folder in it.")
@click.option("--name", help="Name of the model.  [default: the bundle's]")
@click.option("--gpu", "gpus", type=click.IntRange(0), multiple=True, help="GPU of an instance; repeatable.")
@click.option("--batched", is_flag=True, help="Inputs have a leading dimension of 1 (max_batch_size: 1).")
@click.option("--max-batch", type=click.IntRange(1), help="Requests that decode together.  [default: the bundle's]")
@click.option("--max-waiting", type=click.IntRange(0), default=256, show_default=True, help="Requests that may wait.")
@click.option("--drain-timeout", type=click.FloatRange(0), default=30, show_default=True, help="Seconds at unload.")
@policy_option
@backend_option
def triton(
    bundle: Path, out: Path, name: str | None, gpus: tuple[int, ...], batched: bool, max_batch: int | None,
    max_waiting: int, drain_timeout: float, policy: Policy | None, backend: BackendName,
) -> None:  # fmt: skip
    """Write a model repository that serves the bundle at BUNDLE in Triton Inference Server.

    For example:

        d2sd triton bundles/smollm2-135m -o model_repository
    """
    manifest = load_manifest(bundle)
    parameters = Parameters(
        bundle=str(bundle.resolve()), policy=policy, backend=backend, max_batch=max_batch, max_waiting=max_waiting,
        drain_timeout=drain_timeout,
    )  # fmt: skip
    click.echo(write_repository(out, name or manifest.recipe.name, parameters, gpus=gpus, batched=batched))
    click.echo(f"start it: python -m d2sd.serve.triton.run {out}", err=True)
