"""The clients of the soak test: well-behaved ones whose answers are checked, and those that every face meets."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from benchmarks.load.client import Reply
from benchmarks.load.server import Server
from benchmarks.load.workloads import Conversation


@dataclass
class Guests:
    """Clients of one server. `outcomes` counts what happened; `faults` is what must not happen."""

    server: Server
    client: Any  # the server's
    answers: list[tuple[Conversation, str]]  # what plain decoding says
    pause: float  # seconds between two requests of a client, on average
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    stopping: bool = False

    #: Options of the server: the requests that may wait, and others that the clients count on.
    options: ClassVar[tuple[str, ...]] = ("--max-waiting", "12")
    #: Code of the refusal when too many wait, and those at shutdown.
    full: ClassVar[object] = "queue_full"
    leaving: ClassVar[tuple[object, ...]] = ("queue_full", "shutting_down")

    def kinds(self) -> list[Callable[[], Awaitable[str]]]:
        """The clients that run at the same time."""
        asks: list[Callable[[], Awaitable[str]]] = [self.asks] * 4
        return [*asks, self.asks_whole, self.disconnects, self.is_killed, self.crowds]

    async def all(self) -> None:
        """Run every kind of client until `stopping`."""
        await asyncio.gather(*(self._again(kind) for kind in self.kinds()))

    async def _again(self, kind: Callable[[], Awaitable[str]]) -> None:
        name = getattr(kind, "__name__", "client")
        while not self.stopping:
            try:
                self.outcomes[f"{name}: {await asyncio.wait_for(kind(), 300)}"] += 1
            except Exception as error:
                self.faults.append(f"{name}: {type(error).__name__}: {error}")
            await asyncio.sleep(self.draw.expovariate(1 / self.pause))

    def any(self) -> tuple[dict[str, Any], str]:
        """The body of a request, and its answer."""
        one, text = self.draw.choice(self.answers)
        return one.parameters | {"messages": [{"role": "user", "content": one.turns[0]}], "seed": one.seed}, text

    def judge(self, reply: Reply, text: str, refusals: tuple[object, ...] | None = None) -> str:
        """The outcome of a reply: the right answer, or an error of a code that may come."""
        if reply.error is not None:
            if reply.error["code"] not in (refusals or (self.full,)):
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
        return self.judge(await self.client.ask(body), text)

    async def crowds(self) -> str:
        """Send more at once than may wait."""
        pairs = [self.any() for _ in range(24)]
        replies = await asyncio.gather(*(self.client.ask(body) for body, _ in pairs))
        found = Counter(self.judge(reply, text) for reply, (_, text) in zip(replies, pairs, strict=True))
        await asyncio.sleep(5 * self.pause)
        return "some refused" if found[str(self.full)] else "all served"

    async def has_a_deadline(self) -> str:
        """Set a deadline that often passes."""
        body, text = self.any()
        reply = await self.client.ask(body | {"deadline": self.draw.choice([0.001, 0.02, 0.1, 0.5])})
        return self.judge(reply, text, (self.full, "deadline_exceeded"))

    async def asks_whole(self) -> str:
        """Ask for an answer that is not streamed."""
        raise NotImplementedError

    async def disconnects(self) -> str:
        """Leave before the answer, or in the middle of it."""
        raise NotImplementedError

    def victim(self) -> tuple[str, ...]:
        """Arguments of Python for a program that opens four streams, prints a line and reads them."""
        raise NotImplementedError

    async def is_killed(self) -> str:
        """A process with four streams that is killed with SIGKILL."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, *self.victim(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        assert process.stdout is not None
        try:
            await process.stdout.readline()
            await asyncio.sleep(self.draw.uniform(0, 0.3))
        finally:  # also where the server is gone and nothing arrives
            with suppress(ProcessLookupError):  # refused, it has ended
                process.kill()
        await process.wait()
        await asyncio.sleep(4 * self.pause)
        return "killed"
