"""`d2sd serve`: an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from d2sd.bundle.options import EngineOptions
from d2sd.cli import options
from d2sd.cli.report import Reporting
from d2sd.extras import require
from d2sd.option_types import KEY_HELP, Host, Key, Name, Origin, Seconds, not_empty


@click.command(cls=Reporting)
@options.bundle_argument
@click.option("--host", type=Host, default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option(
    "--api-key", "api_keys", type=Key, multiple=True, envvar="D2SD_API_KEY", callback=not_empty, help=KEY_HELP
)
@click.option("--model", type=Name, default="", help="Name in /v1/models.  [default: the bundle's]")
@options.max_waiting_option
@click.option(
    "--max-body", type=click.IntRange(1, 1 << 30), default=4 << 20, show_default=True, help="Bytes of a body."
)
@click.option("--request-timeout", type=Seconds, help="Seconds.  [default: unlimited]")
@options.drain_option
@click.option("--allow-host", "hosts", type=Host, multiple=True, help="Name of this host for clients; repeatable.")
@click.option("--allow-origin", "origins", type=Origin, multiple=True, help="Origin of web pages (CORS); repeatable.")
@click.option("--allow-priority", "priorities", is_flag=True, help="Serve requests of a lower `priority` first.")
@click.option(
    "--metrics-prefix",
    type=click.Choice(["d2sd", "vllm"]),
    default="d2sd",
    show_default=True,
    help="Of the metrics that vLLM has too, for dashboards made for it.",
)
@options.engine_options()
def serve(bundle: Path, host: str, port: int, engine: EngineOptions, **settings: Any) -> None:
    """Serve the bundle at BUNDLE over HTTP, as OpenAI's API.

    A page at / shows speculation at work. SIGTERM and Ctrl-C finish running requests first.

    For example:

        d2sd serve bundles/smollm2-135m --port 8000
    """
    require("serve", ("fastapi", "uvicorn", "prometheus_client"), "d2sd serve")
    from d2sd.serve.openai.run import serve_bundle
    from d2sd.serve.openai.settings import ServerSettings

    serve_bundle(bundle, ServerSettings(**settings), host, port, engine)
