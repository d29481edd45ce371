"""The clients of the soak test that speak HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.attack.plan import MALFORMED
from benchmarks.attack.send import send
from benchmarks.attack.verdicts import of_statuses
from benchmarks.load.client import Reply
from benchmarks.load.guests import Guests
from tools.hostile.case import Scene

_CHAT = "/v1/chat/completions"
_SCENE = Scene(vocab=100, context=256)


class OpenAIGuests(Guests):
    """Clients of OpenAI's chat API."""

    def kinds(self) -> list[Callable[[], Awaitable[str]]]:
        return [*super().kinds(), self.reads_slowly]

    def any(self) -> tuple[dict[str, Any], str]:
        body, text = super().any()
        return body | self.client.always, text

    async def asks_whole(self) -> str:
        body, text = self.any()
        response = await self.client.post(_CHAT, json=body)
        if response.status_code == 200:
            return self.judge(Reply(200, text=response.json()["choices"][0]["message"]["content"]), text)
        return self.judge(self._refused(response.status_code, response.content), text)

    def _refused(self, status: int, body: bytes) -> Reply:
        return Reply(status, error=self.client.error_of(body, status))

    async def disconnects(self) -> str:
        body, _ = self.any()
        body |= {"stream": True}
        chunks = self.draw.randrange(4)
        async with self.client.stream("POST", _CHAT, json=body) as response:
            if response.status_code != 200:
                return self.judge(self._refused(response.status_code, await response.aread()), "")
            async for _line in response.aiter_lines():
                chunks -= 1
                if chunks < 0:
                    return "left"
        return "the answer was faster"

    async def reads_slowly(self) -> str:
        """Read a few bytes at a time through a small buffer."""
        body, _ = self.any()
        data = json.dumps(body | self.client.streamed).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, self.server.address)
            head = f"POST {_CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            head += f"connection: close\r\ncontent-length: {len(data)}\r\n\r\n"
            await loop.sock_sendall(connection, head.encode() + data)
            received = b""
            while part := await loop.sock_recv(connection, 512):
                received += part
                await asyncio.sleep(0.05)
        if b"[DONE]" not in received and str(self.full).encode() not in received:
            raise ValueError(f"the stream of a slow reader broke off: {received[-300:]!r}")
        return "read to the end"

    def victim(self) -> tuple[str, ...]:
        host, port = self.server.address
        return "-S", str(Path(__file__).with_name("victim.py")), host, str(port), "4", json.dumps(self.client.always)


class DynamoGuests(OpenAIGuests):
    """Clients of Dynamo's frontend, which is not d2sd's to fuzz."""

    full = 529
    leaving = (529, 503, 500)

    def judge(self, reply: Reply, text: str, refusals: tuple[object, ...] | None = None) -> str:
        """A space before the first word is the frontend's: it decodes a tiny model's words one by one."""
        return super().judge(replace(reply, text=reply.text.removeprefix(" ")), text, refusals)


class HttpGuests(OpenAIGuests):
    """Clients of `d2sd serve`."""

    options = (*Guests.options, "--max-body", "65536")

    def kinds(self) -> list[Callable[[], Awaitable[str]]]:
        return [*super().kinds(), self.has_a_deadline, self.is_malformed]

    async def is_malformed(self) -> str:
        """A request of every malformed class."""
        for kind in MALFORMED:
            seed = self.draw.randrange(1 << 30)
            sent = await send(self.server.url, kind, [kind.case(seed, 0, _SCENE)], seed, _SCENE, 60.0, 600.0)
            self.faults += of_statuses(sent)
        return "refused"
