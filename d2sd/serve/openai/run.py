"""Runs the app on uvicorn: SIGTERM, SIGHUP and SIGINT refuse new requests, drain, and end the rest with an error."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from d2sd.bundle.options import EngineOptions
from d2sd.bundle.serving import make_engine
from d2sd.errors import D2SDError
from d2sd.io import printable
from d2sd.logs import log_to_stderr
from d2sd.manifest import load_manifest
from d2sd.progress import bar
from d2sd.serve.openai.app import Server, create_app
from d2sd.serve.openai.settings import ServerSettings

logger = logging.getLogger(__name__)

#: Seconds after the drain in which clients can read the last bytes.
_FLUSH = 5
#: Seconds after which the kernel ends a connection whose client takes nothing of what was sent.
_UNREAD = 60
#: How to mend an address that cannot be had, by error number.
_FIXES = {errno.EADDRINUSE: "choose another --port", errno.EACCES: "choose a --port above 1023"}


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains the engine before it closes its port, so that probes see it is not ready."""

    def __init__(self, config: uvicorn.Config, served: Server) -> None:
        super().__init__(config)
        self._served = served
        self.ended_by: int | None = None  # the first signal

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the drain, which Ctrl-C cuts short, then close the port and wait for the responses."""
        engine = self._served.engine
        draining = asyncio.ensure_future(engine.drain(self._served.settings.drain_timeout))
        while not draining.done() and not self.force_exit:
            await asyncio.wait({draining}, timeout=0.1)
        if not draining.done():
            draining.cancel()
            await engine.drain(0)
        self.force_exit = False  # clients get the last events; a further Ctrl-C does not wait for them
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Note signals; uvicorn would raise all of them again at the end, the second in a handler of the first."""
        with on_signals(self.handle_exit, signal.SIGINT):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the server; Ctrl-C again, or after another signal, does so without waiting."""
        self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
        self.should_exit, self.ended_by = True, self.ended_by or sig


@contextmanager
def on_signals(handle: Callable[[int, FrameType | None], Any], *more: signal.Signals) -> Iterator[None]:
    """Handle SIGTERM, SIGHUP unless it is ignored as under nohup, and `more`, where this is the main thread."""
    numbers = [signal.SIGTERM, *more]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    usual = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def serve_bundle(path: Path, settings: ServerSettings, host: str, port: int, options: EngineOptions) -> None:
    """Serve a bundle until a signal. An empty model name takes the bundle's.

    SIGTERM and SIGHUP end the process with exit code 0, after the drain if it serves; Ctrl-C raises KeyboardInterrupt.
    Raises RankLost if one of the processes that share the target has ended; no request is served then.
    """
    _log_to_stderr()
    load_manifest(path)  # another folder is refused before anything is announced
    # the port is open before the bundle is loaded, which takes time
    with listen(host, port) as listener, on_signals(lambda *_: sys.exit(0)):
        settings = _checking_hosts(settings, host, listener.getsockname()[0])
        address = "http://{}:{}".format(*listener.getsockname()[:2])
        logger.info("loading %s; until it is served, clients that connect to %s wait", path, address)
        bundle = options.load(path, progress=bar)
        settings = settings.model_copy(update={"model": settings.model or bundle.recipe.name})
        engine = make_engine(bundle, options)
        app = create_app(bundle, engine, settings)
        logger.info("serving %s at %s", settings.model, address)
        server = make_server(app, host, port)
        gc.collect()
        gc.freeze()  # else every collection of old objects looks through the libraries' too, which takes 0.2 s
        lost: list[D2SDError] = []

        def stop(error: D2SDError) -> None:
            lost.append(error)
            server.should_exit = True

        engine.runner.on_failure(stop)
        server.run([listener])
        engine.runner.close()
        if lost:
            raise lost[0]
        if server.ended_by == signal.SIGINT:
            raise KeyboardInterrupt


def _checking_hosts(settings: ServerSettings, host: str, address: str) -> ServerSettings:
    """The settings with the names that this host may be called by, where the server is local and without keys.

    A web page may give its own name this address (DNS rebinding), and would then read what the server answers.
    """
    local = ip_address(address.partition("%")[0]).is_loopback and not settings.api_keys
    hosts = ("localhost", host, *settings.hosts) if local or settings.hosts else ()
    return settings.model_copy(update={"hosts": hosts})


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
        timeout_graceful_shutdown=_FLUSH,
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
