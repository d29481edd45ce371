"""Middleware of every HTTP request: an id, a log line, the API key and the limit of its body.

`scope["state"]` gets `facts`, which the log line reports, and `client`: whose turns its work takes.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
from collections.abc import Collection
from contextlib import suppress
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import anyio
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from d2sd.panics import is_panic
from d2sd.serve.openai.errors import describe, respond
from d2sd.serve.openai.settings import ServerSettings
from d2sd.serve.openai.spans import Spans

#: One JSON object for each request.
access = logging.getLogger("d2sd.serve.access")

#: Probes, and the files of the page at /, which hold no data.
_OPEN_PATHS = {"/health", "/live", "/ready", "/", "/page.js", "/page.css", "/favicon.ico"}
#: Logged only when they fail: what machines ask every few seconds, and the files of the page.
_QUIET = _OPEN_PATHS | {"/metrics"}
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


#: Of a body that is refused, at most this much is read, for at most this long.
_DISCARD_BYTES, _DISCARD_SECONDS = 64 << 20, 5.0


class _Gone(Exception):
    """The client has closed or reset its connection."""


class Entrance:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, spans: Spans) -> None:
        self.app, self.settings, self.spans = app, settings, spans
        self._keys = [key.encode() for key in settings.api_keys]
        self._hosts = {host.lower().rstrip(".") for host in settings.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        name = headers.get(b"x-request-id", b"").decode("latin-1")
        if not _REQUEST_ID.fullmatch(name):
            name = uuid4().hex
        facts: dict[str, Any] = {"id": name, "method": scope["method"], "path": scope["path"][:200], "status": 0}
        client = scope.get("client") or ("",)
        scope.setdefault("state", {}).update(facts=facts, client=client[0])
        begun = time.monotonic()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            try:
                await send(message)
            except (OSError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "closed" not in str(error):  # uvloop's, of a closed transport
                    raise
                raise _Gone from error

        with self.spans.request(headers, facts):
            try:
                await self._admit(scope, headers, receive, sending)
            except _Gone:
                facts["status"] = 499
            except BaseException as error:  # a bug: everything else has been answered
                if not isinstance(error, Exception) and not is_panic(error):
                    raise
                status, body, _ = describe(error)
                if not facts["status"]:
                    await JSONResponse(body, status)(scope, receive, sending)
            finally:
                facts["seconds"] = round(time.monotonic() - begun, 6)
                quiet = scope["path"] in _QUIET and facts["status"] < 400
                access.log(logging.DEBUG if quiet else logging.INFO, json.dumps(facts))

    async def _admit(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        if self._keys:
            scope["state"]["client"] = headers.get(b"authorization", b"").decode("latin-1")  # several may share a proxy
        if self._keys and scope["path"] not in _OPEN_PATHS and not self._authorised(headers):
            refusal = respond(
                401,
                "The API key is missing or wrong; send it as `Authorization: Bearer KEY`.",
                "invalid_api_key",
                {"www-authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        if self._hosts and not _is_called(self._hosts, headers.get(b"host", b"").decode("latin-1")):
            text = "This server does not answer to that host name; --allow-host adds one."
            await respond(403, text, "host_not_allowed")(scope, receive, send)
            return
        limit = self.settings.max_body
        length = headers.get(b"content-length", b"0")
        too_large = f"The body is larger than {limit} bytes."
        if not length.isdigit() or int(length[:20]) > limit:
            await _discard(receive)
            await respond(413, too_large, "body_too_large", {"connection": "close"})(scope, receive, send)
            return
        size = 0

        async def receiving() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:  # sent in chunks, without a length
                if message.get("more_body"):
                    await _discard(receive)
                raise HTTPException(413, too_large, {"connection": "close"})
            return message

        await self.app(scope, receiving, send)

    def _authorised(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        # every key is compared, in constant time
        return (sum(hmac.compare_digest(key.strip(), known) for known in self._keys) > 0) & (
            scheme.lower() == b"bearer"
        )


def _is_called(hosts: Collection[str], header: str) -> bool:
    """Whether the Host of a request is an address, which no web page can take for its own name, or one of `hosts`."""
    try:
        name = (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return False
    with suppress(ValueError):
        return bool(ip_address(name))
    return name in hosts or not header


async def _discard(receive: Receive) -> None:
    """Read the rest of a body. A client that is still sending when the connection closes would not see the refusal."""
    size = 0
    with anyio.move_on_after(_DISCARD_SECONDS):
        while size < _DISCARD_BYTES:
            message = await receive()
            size += len(message.get("body", b""))
            if not message.get("more_body"):
                return
