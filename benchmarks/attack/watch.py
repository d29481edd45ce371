"""Watches the memory of a server, and kills one that takes too much before it takes the machine."""

from __future__ import annotations

import os
import signal
import time
from threading import Event, Thread
from types import TracebackType

from benchmarks.load.server import Server

#: Seconds between two looks.
_SAMPLE = 0.2


class Watch(Thread):
    """A thread that samples the resident memory of a server's processes."""

    def __init__(self, server: Server, most: int) -> None:
        super().__init__(name="watch", daemon=True)
        self.server, self.most = server, most
        self.killed = False
        self.samples: list[tuple[float, int]] = []  # (monotonic time, bytes)
        self._over = Event()

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Sample until the end; a server with more than `most` bytes is killed with all its processes."""
        while not self._over.wait(_SAMPLE):
            size = self.server.resident_bytes()
            self.samples.append((time.monotonic(), size))
            if size > self.most:
                self.killed = True
                kill(self.server)

    def peak(self, since: float = 0.0) -> int:
        """The largest sample since a moment; 0 if there is none."""
        return max((size for at, size in self.samples if at >= since), default=0)


def kill(server: Server) -> None:
    """End all processes of a server at once."""
    for pid in server.processes():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
