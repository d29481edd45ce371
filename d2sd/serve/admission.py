"""The requests that a server has accepted, within its bound, and why it refuses others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from threading import RLock

from d2sd.errors import D2SDError
from d2sd.serve.errors import QueueFull
from d2sd.serve.stream import Stream


class Admission:
    """The streams accepted and not ended. Methods may be called in any thread, and by finalizers."""

    def __init__(self, running: int, waiting: int, refusal: D2SDError) -> None:
        """Bounds of the requests that run and that wait; `refusal` is the reason to accept none yet."""
        self._running, self._room = running, running + waiting
        self._final = False  # whether the refusal is
        self._streams: set[Stream] = set()
        self._lock = RLock()  # a finalizer may come while its thread has it
        self.refusal: D2SDError | None = refusal

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def streams(self) -> set[Stream]:
        """A copy of the set."""
        with self._lock:
            return set(self._streams)

    def add(self, streams: Sequence[Stream]) -> None:
        """Accept all or none. Raises the reason to accept none, and `QueueFull`.

        At its end the queue has places for clients that have none in it.
        """
        with self._lock:
            if self.refusal is not None:
                raise self.refusal
            live, most = len(self._streams) + len(streams), self._room
            if live > most and len(streams) == 1:
                known = {stream.request.client for stream in self._streams}
                most += 0 if streams[0].request.client in known else self._running
            if live > most:
                raise QueueFull(
                    "Too many requests are waiting.",
                    found=f"{len(self._streams)} running and waiting",
                    expected=f"at most {self._room}",
                    fix="try again later",
                )
            self._streams.update(streams)

    def discard(self, stream: Stream) -> None:
        """Make room: the stream has ended."""
        with self._lock:
            self._streams.discard(stream)

    def refuse(self, reason: D2SDError | None, *, final: bool = False) -> bool:
        """Accept no more, for this reason, or again if there is none; returns False where an earlier one is final."""
        with self._lock:
            if self._final:
                return False
            self.refusal, self._final = reason, final
            return True

    async def emptied(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until no stream is left; returns whether none is."""
        end = time.monotonic() + timeout
        while self._streams and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return not self._streams
