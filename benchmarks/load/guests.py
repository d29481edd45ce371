"""The clients of the soak test: well-behaved ones whose answers are checked, and all the others a server meets."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.load.client import Reply, ask, error_of
from benchmarks.load.fuzz import fuzz
from benchmarks.load.workloads import Conversation

_CHAT = "/v1/chat/completions"


@dataclass
class Guests:
    """Clients of one server. `outcomes` counts what happened; `faults` is what must not happen."""

    url: str
    client: httpx.AsyncClient
    answers: list[tuple[Conversation, str]]  # what plain decoding says
    max_body: int
    pause: float  # seconds between two requests of a client, on average
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    stopping: bool = False

    async def all(self) -> None:
        """Run every kind of client until `stopping`."""
        kinds = [self.asks] * 4 + [
            self.asks_whole, self.disconnects, self.has_a_deadline, self.sends_too_much, self.reads_slowly,
            self.is_malformed, self.is_killed, self.crowds,
        ]  # fmt: skip
        await asyncio.gather(*(self._again(kind) for kind in kinds))

    async def _again(self, kind: Callable[[], Awaitable[str]]) -> None:
        name = getattr(kind, "__name__", "client")
        while not self.stopping:
            try:
                self.outcomes[f"{name}: {await asyncio.wait_for(kind(), 300)}"] += 1
            except Exception as error:
                self.faults.append(f"{name}: {type(error).__name__}: {error}")
            await asyncio.sleep(self.draw.expovariate(1 / self.pause))

    # -- answers are checked -------------------------------------------------------------------------------------------

    def any(self) -> tuple[dict[str, Any], str]:
        """The body of a request, and its answer."""
        one, text = self.draw.choice(self.answers)
        return one.parameters | {"messages": [{"role": "user", "content": one.turns[0]}], "seed": one.seed}, text

    def judge(self, reply: Reply, text: str, refusals: tuple[str, ...] = ("queue_full",)) -> str:
        """The outcome of a reply: the right answer, or an error of a code that may come."""
        if reply.error is not None:
            if reply.error["code"] not in refusals:
                raise ValueError(f"error {reply.error}")
            if not text.startswith(reply.text):
                raise ValueError(f"wrong beginning: {reply.text!r} instead of {text!r}")
            return str(reply.error["code"])
        if reply.text != text:
            raise ValueError(f"wrong answer: {reply.text!r} instead of {text!r}")
        return "right answer"

    async def asks(self) -> str:
        """Read a stream to its end."""
        body, text = self.any()
        return self.judge(await ask(self.client, body), text)

    async def asks_whole(self) -> str:
        """Ask for an answer that is not streamed."""
        body, text = self.any()
        response = await self.client.post(_CHAT, json=body)
        if response.status_code == 200:
            return self.judge(Reply(200, text=response.json()["choices"][0]["message"]["content"]), text)
        return self.judge(Reply(response.status_code, error=error_of(response.content)), text)

    async def has_a_deadline(self) -> str:
        """Set a deadline that often passes."""
        body, text = self.any()
        reply = await ask(self.client, body | {"deadline": self.draw.choice([0.001, 0.02, 0.1, 0.5])})
        return self.judge(reply, text, ("queue_full", "deadline_exceeded"))

    async def crowds(self) -> str:
        """Send more at once than may wait."""
        pairs = [self.any() for _ in range(24)]
        replies = await asyncio.gather(*(ask(self.client, body) for body, _ in pairs))
        found = Counter(self.judge(reply, text) for reply, (_, text) in zip(replies, pairs, strict=True))
        await asyncio.sleep(5 * self.pause)
        return "some refused" if found["queue_full"] else "all served"

    # -- connections break ---------------------------------------------------------------------------------------------

    async def disconnects(self) -> str:
        """Leave before the answer, or in the middle of it."""
        body, _ = self.any()
        body |= {"stream": True}
        chunks = self.draw.randrange(4)
        async with self.client.stream("POST", _CHAT, json=body) as response:
            if response.status_code != 200:
                return self.judge(Reply(response.status_code, error=error_of(await response.aread())), "")
            async for _line in response.aiter_lines():
                chunks -= 1
                if chunks < 0:
                    return "left"
        return "the answer was faster"

    async def reads_slowly(self) -> str:
        """Read a few bytes at a time through a small buffer."""
        body, _ = self.any()
        data = json.dumps(body | {"stream": True, "return_token_ids": True}).encode()
        address = urlsplit(self.url)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, (address.hostname, address.port))
            head = f"POST {_CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
            await loop.sock_sendall(connection, f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            received = b""
            while part := await loop.sock_recv(connection, 512):
                received += part
                await asyncio.sleep(0.05)
        if b"[DONE]" not in received and b'"queue_full"' not in received:
            raise ValueError(f"the stream of a slow reader broke off: {received[-300:]!r}")
        return "read to the end"

    async def is_killed(self) -> str:
        """A process with four streams that is killed with SIGKILL."""
        address = urlsplit(self.url)
        victim = Path(__file__).with_name("victim.py")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", str(victim), str(address.hostname), str(address.port), "4",
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await asyncio.sleep(self.draw.uniform(0.05, 0.6))
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()
        await asyncio.sleep(4 * self.pause)
        return "killed" if process.returncode == -signal.SIGKILL else "ended before"

    # -- bodies are wrong ----------------------------------------------------------------------------------------------

    async def sends_too_much(self) -> str:
        """A body above the limit: with its length, or in chunks without one."""
        data = json.dumps({"messages": [{"role": "user", "content": "w5 " * self.max_body}]}).encode()

        async def chunks() -> Any:
            for start in range(0, len(data), 4096):
                yield data[start : start + 4096]

        content = data if self.draw.random() < 0.5 else chunks()
        try:
            response = await self.client.post(_CHAT, content=content, headers={"content-type": "application/json"})
        except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
            return "the connection was closed while sending"
        if response.status_code != 413:
            raise ValueError(f"status {response.status_code} for a body that is too large")
        return str(error_of(response.content)["code"])

    async def is_malformed(self) -> str:
        """Five requests of the fuzzer."""
        first = self.draw.randrange(1 << 30)
        _, faults = await fuzz(self.url, range(first, first + 5), at_once=1)
        self.faults += faults
        return "refused"
