"""`d2sd serve`: an OpenAI-compatible server."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click

from d2sd.cli.options import (
    Name,
    Seconds,
    backend_option,
    bundle_argument,
    device_option,
    drain_timeout_option,
    max_batch_option,
    max_waiting_option,
    policy_option,
    prefix_cache_option,
)
from d2sd.cli.report import Reporting
from d2sd.convert.bundle.backends import BackendName
from d2sd.extras import require
from d2sd.recipe import Policy


class _Pattern(click.ParamType[str]):
    """A text of one form; `wanted` completes "Not ..."."""

    name = "text"

    def __init__(self, pattern: str, wanted: str) -> None:
        self._pattern, self._wanted = re.compile(pattern, re.ASCII), wanted

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not self._pattern.fullmatch(value):
            self.fail(f"Not {self._wanted}.", param, ctx)  # without the value: it may be a key
        return value


_HOST = _Pattern(r"[\w.:%-]+", "an address or the name of a host")
_KEY = _Pattern(r"[!-~]+", "a key: it is empty, or has spaces or other than ASCII characters")
_ORIGIN = _Pattern(r"\*|https?://[\w.:\[\]-]+", "an origin: SCHEME://HOST, SCHEME://HOST:PORT or *")


def _keys(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse an empty D2SD_API_KEY, which Click takes for an unset one: the server would be open."""
    if not value and "D2SD_API_KEY" in os.environ:
        raise click.BadParameter("D2SD_API_KEY is empty; unset it to serve without keys.", context, parameter)
    return value


@click.command(cls=Reporting)
@bundle_argument
@click.option(
    "--host", type=_HOST, default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is all."
)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option(
    "--api-key",
    "api_keys",
    type=_KEY,
    multiple=True,
    envvar="D2SD_API_KEY",
    callback=_keys,
    help="Key of a client; repeatable. Better in D2SD_API_KEY: `ps` shows options to every user.",
)
@click.option("--model", type=Name, default="", help="Name in /v1/models.  [default: the bundle's]")
@max_batch_option
@max_waiting_option
@click.option(
    "--max-body", type=click.IntRange(1, 1 << 30), default=4 << 20, show_default=True, help="Bytes of a request body."
)
@click.option("--request-timeout", type=Seconds(min_open=True), help="Seconds.  [default: unlimited]")
@drain_timeout_option
@click.option(
    "--allow-origin",
    "origins",
    type=_ORIGIN,
    multiple=True,
    metavar="ORIGIN",
    help="Web pages of this origin may use the server (CORS); repeatable, * is any.  [default: none]",
)
@prefix_cache_option
@policy_option
@device_option
@backend_option
def serve(
    bundle: Path, host: str, port: int, max_batch: int | None, prefix_cache: bool | None, policy: Policy | None,
    device: str, backend: BackendName, **settings: Any,
) -> None:  # fmt: skip
    """Serve the bundle at BUNDLE over HTTP, as OpenAI's API.

    A page at / shows speculation at work. SIGTERM and Ctrl-C finish running requests first.

    For example:

        d2sd serve bundles/smollm2-135m --port 8000
    """
    require("serve", ("fastapi", "uvicorn", "prometheus_client"), "d2sd serve")
    from d2sd.serve.openai.run import serve_bundle
    from d2sd.serve.openai.settings import ServerSettings

    serve_bundle(
        bundle, ServerSettings(**settings), host, port,
        policy=policy, device=device, backend=backend, max_batch=max_batch, prefix_cache=prefix_cache,
    )  # fmt: skip
