"""Responses that end with their client: when it disconnects, what works for it is cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from d2sd.serve.openai.errors import describe

T = TypeVar("T")


class Disconnected(Exception):
    """The client has gone."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects; then raises Disconnected."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Disconnected
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})


class EventStream(Response):
    """Server-sent events: each object as one `data:` line, errors too, and [DONE] at the end."""

    media_type = "text/event-stream"
    end = "data: [DONE]\n\n"

    def __init__(self, events: AsyncIterator[dict[str, Any]], close: Callable[[], None]) -> None:
        """`close` is called at the end, however it comes."""
        self._events, self._close, self.sent = events, close, 0
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end or the client disconnects."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(Disconnected):
                await while_connected(receive, self._send(send))
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        async def body(text: str) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        try:
            async for event in self._events:
                await body(self.frame(event))
                self.sent += 1
        except Exception as error:  # the status has been sent: the error is an event
            await body(self.frame(self.failure(error)))
        await body(self.end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def frame(self, event: dict[str, Any]) -> str:
        """The text of an event."""
        return f"data: {json.dumps(event, separators=(',', ':'))}\n\n"

    def failure(self, error: Exception) -> dict[str, Any]:
        """The event of an error."""
        return describe(error)[1]
