"""A d2sd server in a thread, for clients of this process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import httpx
from fastapi import FastAPI

from d2sd.bundle.load import load_bundle
from d2sd.bundle.serving import make_engine
from d2sd.runtime.engine import Engine
from d2sd.serve.openai.app import Server, create_app
from d2sd.serve.openai.middleware import Entrance
from d2sd.serve.openai.run import make_server
from d2sd.serve.openai.settings import ServerSettings
from d2sd.serve.openai.spans import Spans

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


class Running:
    """A server that accepts connections."""

    def __init__(self, url: str, app: FastAPI, key: str) -> None:
        self.app, self.url, self._key = app, url, key
        self.server: Server = app.state.server
        self.service, self.engine = self.server.engine, self.server.engine.engine
        self.http = httpx.Client(base_url=url, timeout=30)

    # The SDK is imported by the tests that use it: the environments of Triton and Dynamo do not have it.

    @cached_property
    def openai(self) -> OpenAI:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key=self._key, max_retries=0, timeout=30)

    @cached_property
    def async_openai(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self._key, max_retries=0, timeout=30)

    def close(self) -> None:
        """Close the clients that were used."""
        self.http.close()
        if "openai" in vars(self):
            self.openai.close()


@contextmanager
def serving(bundle: Path, engine: Engine | None = None, **settings: Any) -> Iterator[Running]:
    """Serve a bundle on a free port of the loopback device."""
    loaded = load_bundle(bundle)
    options = ServerSettings(**{"model": "tiny", "drain_timeout": 5.0, **settings})
    app = create_app(loaded, engine or make_engine(loaded, max_batch=8), options)
    app.state.uvicorn = server = make_server(app, "127.0.0.1", 0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        thread = Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        running = Running(f"http://127.0.0.1:{listener.getsockname()[1]}", app, "key")
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        try:
            yield running
        finally:
            running.close()
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def wait_until(condition: Callable[[], object], seconds: float = 30) -> float:
    """Wait for a condition; returns the seconds it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + seconds, "timed out"
        time.sleep(0.005)
    return time.monotonic() - begun


async def enter(
    path: str, *, error: Exception | None = None, host: str = "", hosts: tuple[str, ...] = ()
) -> tuple[int, bytes]:
    """Status and body of the answer to a request that passes the middleware; sending the body may fail."""
    sent = list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def send(message: Any) -> None:
        if error is not None and message["type"] == "http.response.body":
            raise error
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    headers = [(b"host", host.encode())]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "client": ("10.0.0.1", 5)}
    await Entrance(app, ServerSettings(model="m", hosts=hosts), Spans())(scope, receive, send)
    return sent[0]["status"], sent[-1].get("body", b"")


async def until(condition: Callable[[], object]) -> None:
    """Wait for it and let others run."""
    while not condition():
        await asyncio.sleep(0.001)
