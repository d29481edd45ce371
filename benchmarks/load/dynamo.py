"""A frontend of NVIDIA Dynamo and one worker on the loopback interface, and a client of the frontend."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import httpx

from benchmarks.load.client import HttpClient
from benchmarks.load.server import D2SD, Server, end, family, spawn, wait_until
from d2sd.extras import require


class DynamoServer(Server):
    """A frontend, at `url`, and its worker."""

    worker: subprocess.Popen[bytes] | None = None
    system_port = 0  # of the worker

    @classmethod
    def start(cls, bundle: Path, log: Path, options: Sequence[str] = ()) -> DynamoServer:
        """See `Server.start`; the options are those of `d2sd worker`. The frontend's log is beside the worker's."""
        require("dynamo", ("dynamo",), "A load over Dynamo")
        folder = log.with_suffix(".fleet")
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("store", "home"):
            (folder / name).mkdir(parents=True)
        environment = loopback(folder / "store", folder / "home")
        http, system = free_port(), free_port()
        worker = spawn(
            [*D2SD, "worker", str(bundle.resolve()), "--dynamo", *options],
            log,
            environment | {"DYN_SYSTEM_PORT": str(system)},
        )
        command = [sys.executable, "-m", "dynamo.frontend", "--http-port", str(http), "--migration-limit", "3"]
        command += ["--discovery-backend", "file", "--request-plane", "tcp"]
        frontend = spawn(command, log.with_suffix(".frontend.log"), environment)
        url = f"http://127.0.0.1:{http}"
        wait_until(lambda: url if _models(url) else None, [worker, frontend], log)
        server = cls(url, bundle, frontend, log)
        server.worker, server.system_port = worker, system
        return server

    def connect(self, *, connections: int = 256) -> HttpClient:
        return DynamoClient(self.url, self.model, connections=connections)

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.system_port}/metrics"

    def processes(self) -> list[int]:
        return super().processes() + ([] if self.worker is None else family(self.worker.pid))

    def stop(self, timeout: float = 60) -> int | None:
        """End the worker, which finishes its requests, then the frontend; the exit code of the worker."""
        try:
            return None if self.worker is None else end(self.worker, timeout)
        finally:
            super().stop(timeout)


class DynamoClient(HttpClient):
    """A client of Dynamo's frontend, which knows no `return_token_ids`: the usage of a chunk counts its tokens."""

    streamed: ClassVar[dict[str, Any]] = {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }

    def __init__(self, url: str, model: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.always = {"model": model}

    def error_of(self, body: bytes, status: int) -> dict[str, Any]:
        """Dynamo's error object: message, type and code, inside a stream below `error`."""
        found = json.loads(body)
        error = found.get("error", found)
        if not error["message"]:
            raise ValueError(f"not an error body of Dynamo: {body[:200]!r}")
        return {**error, "code": error.get("code", status)}


def free_port() -> int:
    """A free port below 32768: Dynamo reads DYN_SYSTEM_PORT as a signed number of 16 bits."""
    for port in random.sample(range(20000, 32768), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def loopback(store: Path, home: Path) -> dict[str, str]:
    """The environment of every process: file discovery, and no port beyond the loopback interface."""
    old = tuple(map(int, version("ai-dynamo").split(".")[:2])) < (1, 6)
    return {
        **os.environ,
        "DYN_FILE_KV": str(store),
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
        "DYN_HTTP_HOST": "127.0.0.1",
        "DYN_SYSTEM_HOST": "127.0.0.1",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "lo" if old else "127.0.0.1",  # before 1.6 the name of an interface
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_REQUEST_PLANE": "tcp",
        "OMP_NUM_THREADS": "1",
    }


def _models(url: str) -> list[Any]:
    try:
        return list(httpx.get(f"{url}/v1/models", timeout=5).json()["data"])
    except (httpx.TransportError, ValueError, KeyError):
        return []
