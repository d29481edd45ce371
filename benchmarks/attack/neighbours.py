"""The honest clients, in a process of their own so that building hostile bodies does not delay what they measure.

    python -m benchmarks.attack.neighbours URL FILE CLIENTS PAUSE < BODIES

Each client asks one of the bodies (a JSON list of chats) as a stream, again and again with pauses of PAUSE seconds on
average until SIGTERM, and writes a line to FILE for every answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx

from benchmarks.load.client import HttpClient

#: Seconds between two tries of a request that is refused.
_RETRY = 0.2


@dataclass(slots=True)
class Visit:
    """One question of an honest client; times are those of the machine's monotonic clock, in seconds."""

    body: int  # its index
    sent: float
    first: float | None = None  # when the first token arrived; None: it never did
    end: float = 0.0
    text: str = ""
    complete: bool = False
    refused: int = 0  # times that it was told to try again
    error: str = ""

    @property
    def delay(self) -> float:
        """Seconds to the first token, refusals included; until the client gave up if there was none."""
        return (self.end if self.first is None else self.first) - self.sent


async def ask(client: HttpClient, number: int, body: dict[str, Any], visit: Visit) -> None:
    """Ask until an answer comes that is no refusal, and fill in the visit."""
    while True:
        begun = time.monotonic()
        try:
            reply = await client.ask(body | {"cache_salt": f"{number} {visit.sent}"})  # never a prefix hit
        except (httpx.TransportError, ValueError) as error:
            visit.error = f"{type(error).__name__}: {error}"
            await asyncio.sleep(_RETRY)
            return
        if reply.status in (429, 503):
            visit.refused += 1
            await asyncio.sleep(_RETRY)
            continue
        visit.first = begun + reply.arrivals[0][0] if reply.arrivals else None
        visit.text, visit.complete = reply.text, reply.complete
        visit.error = "" if reply.error is None else f"status {reply.status}: {reply.error}"
        return


async def visits(url: str, bodies: Sequence[dict[str, Any]], clients: int, pause: float, out: TextIO) -> None:
    """Run the clients until they are cancelled; a question that is open then is written without an answer."""
    draw = random.Random()

    async def one(number: int) -> None:
        async with HttpClient(url, address=f"127.0.0.{2 + number}") as client:  # a client of its own to the server
            while True:
                visit = Visit(draw.randrange(len(bodies)), time.monotonic())
                try:
                    await ask(client, number, bodies[visit.body], visit)
                finally:
                    visit.end = time.monotonic()
                    out.write(json.dumps(asdict(visit)) + "\n")
                    out.flush()
                await asyncio.sleep(draw.expovariate(1 / pause))

    await asyncio.gather(*(one(number) for number in range(clients)))


async def until_signal(url: str, bodies: Sequence[dict[str, Any]], clients: int, pause: float, out: TextIO) -> None:
    """Run until SIGTERM."""
    running = asyncio.ensure_future(visits(url, bodies, clients, pause, out))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    await asyncio.wait({running})
    if not running.cancelled():
        running.result()


class Neighbours:
    """The process of the honest clients, and what they have met so far."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path) -> None:
        self.process, self._out = process, out

    @staticmethod
    @contextmanager
    def started(
        url: str, bodies: Sequence[Mapping[str, Any]], out: Path, clients: int, pause: float
    ) -> Iterator[Neighbours]:
        """Start the clients, and stop them at the end."""
        command = [sys.executable, "-m", "benchmarks.attack.neighbours", url, str(out), str(clients), str(pause)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            process.stdin.write(json.dumps(bodies).encode())
            process.stdin.close()
            made = Neighbours(process, out)
            try:
                yield made
            finally:
                made.stop()

    def stop(self) -> None:
        """End the clients; questions that are open then are written without an answer."""
        self.process.terminate()
        self.process.wait(30)

    def visits(self) -> list[Visit]:
        """All visits that have ended."""
        return read(self._out)

    def since(self, moment: float) -> int:
        """Visits begun after a moment that have got an answer."""
        return sum(visit.complete and visit.sent >= moment for visit in self.visits())


def read(path: Path) -> list[Visit]:
    """The visits of a file; a line that is being written is left out."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [Visit(**json.loads(line)) for line in lines]


if __name__ == "__main__":
    with Path(sys.argv[2]).open("a") as stream:
        asyncio.run(until_signal(sys.argv[1], json.load(sys.stdin), int(sys.argv[3]), float(sys.argv[4]), stream))
