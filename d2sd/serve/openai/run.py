"""Runs the app on uvicorn: SIGTERM and SIGINT stop accepting, drain, and end the rest with an error."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from fastapi import FastAPI

    from d2sd.serve.openai.app import Server

#: Seconds after the drain in which clients can read the last bytes.
_FLUSH = 5


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


def make_server(app: FastAPI, host: str, port: int) -> DrainingServer:
    """A server that is not running yet; `run()` serves until a signal, or until `should_exit` is set."""
    served: Server = app.state.server
    config = uvicorn.Config(
        app, host=host, port=port, access_log=False, log_config=None, lifespan="on", ws="none",
        timeout_graceful_shutdown=int(served.settings.drain_timeout) + _FLUSH, server_header=False,
    )  # fmt: skip
    return DrainingServer(config, served)


class _JsonLines(logging.Formatter):
    """One JSON object a line. The access log's messages are objects already."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        line = {"time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"), "level": record.levelname.lower()}
        if record.name == "d2sd.serve.access":
            return json.dumps(line | {"event": "request"} | json.loads(record.getMessage()))
        line |= {"event": "log", "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr() -> None:
    """Write the logs of d2sd and uvicorn to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    for name in ("d2sd", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
