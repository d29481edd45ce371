"""Runs the app on uvicorn: SIGTERM and SIGINT stop accepting, drain, and end the rest with an error."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from d2sd.bundle.load import load_bundle
from d2sd.bundle.serving import make_engine
from d2sd.errors import D2SDError
from d2sd.io import printable
from d2sd.logs import log_to_stderr
from d2sd.progress import bar
from d2sd.serve.openai.app import create_app

if TYPE_CHECKING:
    from fastapi import FastAPI

    from d2sd.serve.openai.app import Server
    from d2sd.serve.openai.settings import ServerSettings

logger = logging.getLogger(__name__)

#: Seconds after the drain in which clients can read the last bytes.
_FLUSH = 5
#: Seconds after which the kernel ends a connection whose client takes nothing of what was sent.
_UNREAD = 60
#: How to mend an address that cannot be had, by error number.
_FIXES = {errno.EADDRINUSE: "choose another --port", errno.EACCES: "choose a --port above 1023"}


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains the engine while it waits for its connections."""

    def __init__(self, config: uvicorn.Config, served: Server) -> None:
        super().__init__(config)
        self._served = served

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, then wait for the drain and for the responses."""
        draining = asyncio.ensure_future(self._served.engine.drain(self._served.settings.drain_timeout))
        await super().shutdown(sockets)
        await draining


def serve_bundle(
    path: Path, settings: ServerSettings, host: str, port: int, *, tensor_parallel: int = 1, **options: Any
) -> None:
    """Serve a bundle until a signal; `options` are those of `make_engine`. An empty model name takes the bundle's.

    After the drain SIGTERM ends the process with exit code 0, Ctrl-C with 130. Raises RankLost if one of the processes
    that share the target has ended; no request is served then.
    """
    _log_to_stderr()
    with listen(host, port) as listener:  # before the bundle is loaded, which takes time
        address = "http://{}:{}".format(*listener.getsockname()[:2])
        logger.info("loading %s; until it is served, clients that connect to %s wait", path, address)
        device = options.get("device", "cpu")
        bundle = load_bundle(path, progress=bar, tensor_parallel=tensor_parallel, device=device)
        settings = replace(settings, model=settings.model or bundle.recipe.name)
        engine = make_engine(bundle, **options)
        app = create_app(bundle, engine, settings)
        logger.info("serving %s at %s", settings.model, address)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again when it has shut down
        server = make_server(app, host, port)
        gc.collect()
        gc.freeze()  # else every collection of old objects looks through the libraries' too, which takes 0.2 s
        lost: list[D2SDError] = []

        def stop(error: D2SDError) -> None:
            lost.append(error)
            server.should_exit = True

        engine.runner.on_failure(stop)
        server.run([listener])
        engine.close()
        if lost:
            raise lost[0]


def listen(host: str, port: int) -> socket.socket:
    """A listening socket: connections wait in its queue until a server accepts them.

    A second server with the same address fails at once. Raises D2SDError if the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named; without it every write may wait 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # of Linux; accepted connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNREAD)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, UnicodeError) as error:  # of names that cannot be encoded, such as ..
        listener.close()
        number, reason = getattr(error, "errno", None), getattr(error, "strerror", None)
        raise D2SDError(
            "The server cannot listen there.",
            found=f"{host}:{port}: {reason or error}",
            fix=_FIXES.get(number or 0, "give --host an address of this machine: 127.0.0.1, or 0.0.0.0 for all"),
        ) from None
    return listener


def make_server(app: FastAPI, host: str, port: int) -> DrainingServer:
    """A server that is not running yet; `run()` serves until a signal, or until `should_exit` is set."""
    served: Server = app.state.server
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        access_log=False,
        log_config=None,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=int(served.settings.drain_timeout) + _FLUSH,
        server_header=False,
    )
    return DrainingServer(config, served)


class _JsonLines(logging.Formatter):
    """One JSON object a line. The access log's messages are objects already."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"), "level": record.levelname.lower()}
        if record.name == "d2sd.serve.access":
            return json.dumps(line | {"event": "request"} | json.loads(record.getMessage()))
        line |= {"event": "log", "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _TextLines(logging.Formatter):
    """Lines for people."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == "d2sd.serve.access":
            facts = json.loads(record.getMessage())
            tokens = f", {facts['completion_tokens']} tokens" if "completion_tokens" in facts else ""
            message = f"{facts['method']} {facts['path']} {facts['status']}{tokens}, {facts['seconds']:.2f} s"
            message = message.replace("\n", " ")  # of a path: it would look like another line of the log
            record = logging.makeLogRecord(record.__dict__ | {"msg": message, "args": ()})
        return printable(super().format(record))  # a path may hold what moves the cursor


def _log_to_stderr() -> None:
    """Write the logs of d2sd and uvicorn to stderr: as text on a terminal, else as JSON lines."""
    text = _TextLines("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    # It is logged for a request whose connection is gone: of several requests sent at once only the last learns that.
    logging.getLogger("uvicorn.error").addFilter(lambda record: "without completing response" not in str(record.msg))
    log_to_stderr(text if sys.stderr.isatty() else _JsonLines(), "d2sd", "uvicorn")
