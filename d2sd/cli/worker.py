"""`d2sd worker`: one worker of a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from d2sd.bundle.options import EngineOptions
from d2sd.cli import options
from d2sd.cli.report import Reporting
from d2sd.errors import D2SDError
from d2sd.extras import require
from d2sd.option_types import Name


@click.command(cls=Reporting)
@options.bundle_argument
@click.option("--dynamo", is_flag=True, required=True, help="A worker of NVIDIA Dynamo.")
@click.option("--model", type=Name, default="", help="Name in /v1/models.  [default: the bundle's]")
@click.option(
    "--namespace", type=Name, default="dynamo", envvar="DYN_NAMESPACE", show_default=True, help="Dynamo's namespace."
)
@click.option(
    "--discovery",
    type=click.Choice(["kubernetes", "etcd", "file"]),
    default="etcd",
    envvar="DYN_DISCOVERY_BACKEND",
    show_default=True,
    help="Where workers register.",
)
@options.max_waiting_option
@options.drain_option
@click.option("--kv-events/--no-kv-events", default=True, help="Report the prefix cache to the router.")
@click.option("--disaggregation-mode", default="agg", hidden=True)
@options.engine_options()
def worker(bundle: Path, dynamo: bool, disaggregation_mode: str, engine: EngineOptions, **settings: Any) -> None:
    """Serve the bundle at BUNDLE as one worker behind Dynamo's frontend.

    SIGTERM finishes running requests within the drain timeout; the rest move to other workers.

    For example:

        d2sd worker bundles/smollm2-135m --dynamo --discovery file
    """
    if disaggregation_mode != "agg":
        raise D2SDError(
            "Disaggregated serving is not supported: one worker computes prompts and answers.",
            where="--disaggregation-mode",
            found=disaggregation_mode,
            expected="agg",
        )
    require("dynamo", ("dynamo", "prometheus_client"), "d2sd worker --dynamo")
    from d2sd.serve.dynamo.engine import WorkerSettings
    from d2sd.serve.dynamo.run import run_worker

    run_worker(bundle, WorkerSettings(**settings), engine)
