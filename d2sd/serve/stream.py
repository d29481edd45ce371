"""The outputs of one request, on their way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from d2sd.runtime.sequence import Output

if TYPE_CHECKING:
    from d2sd.errors import D2SDError
    from d2sd.runtime.decode import StepTrace
    from d2sd.runtime.request import Request
    from d2sd.runtime.sequence import Sequence as Running

#: Called in the engine's thread with each step of a request.
Watch = Callable[["StepTrace", Output], None]
#: Outputs that wait for their reader before they are merged into one.
_UNMERGED = 32


class Stream:
    """An async iterator over the outputs of one request, made by `AsyncEngine.submit`.

    Outputs that the reader has not taken yet are merged: a slow reader gets fewer, longer ones, and memory is bounded
    by the length of the answer. After the last output a request that failed raises its `D2SDError`.
    """

    def __init__(
        self,
        request: Request,
        abandon: Callable[[Stream], None],
        expires: float | None = None,
        watch: Watch | None = None,
        interval: int = 1,
    ) -> None:
        """`abandon` is called when the reader leaves early. `expires` is a time of `time.monotonic()`.

        A reader that waits gets the first output at once, then at least `interval` tokens at a time.
        """
        self.request, self.expires, self.watch, self.interval = request, expires, watch, interval
        self.loop = asyncio.get_running_loop()
        self.sequence: Running | None = None  # set by the engine's thread when the engine takes the request
        self.ended = False  # set by the engine's thread: no more outputs will come
        self._abandon = abandon
        self._error: D2SDError | None = None
        self._lock = Lock()
        self._pending: list[Output] = []
        self._begun = False  # the first tokens have come
        self._ready = asyncio.Event()

    # -- the reader ----------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Output:
        while True:
            self._ready.clear()  # before looking: what arrives afterwards sets it again
            with self._lock:
                pending, self._pending = self._pending, []
                ended, error = self.ended, self._error
            if pending:
                return merge(pending)
            if error is not None:
                raise error
            if ended:
                raise StopAsyncIteration
            await self._ready.wait()

    def close(self) -> None:
        """Cancel the request if it still runs. Call it when the reader leaves; it may be called twice."""
        if not self.ended:
            self._abandon(self)

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def push(self, output: Output) -> bool:
        """Add an output; returns whether `wake` must follow: not while the next output may join it."""
        with self._lock:
            self._pending.append(output)
            if len(self._pending) > _UNMERGED:
                self._pending = [merge(self._pending)]
            begun, self._begun = self._begun, True
            tokens = sum(len(pending.tokens) for pending in self._pending)
            return not begun or tokens >= self.interval or output.finish is not None

    def end(self, error: D2SDError | None = None) -> None:
        """Mark the end, with an error if given; `wake` must follow. Later calls change nothing."""
        with self._lock:
            if not self.ended:
                self.ended, self._error = True, error

    @staticmethod
    def wake(streams: Sequence[Stream]) -> None:
        """Wake the readers of `streams`, with one call into each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
        for stream in streams:
            by_loop.setdefault(stream.loop, []).append(stream)
        for loop, group in by_loop.items():
            try:
                loop.call_soon_threadsafe(_set_ready, group)
            except RuntimeError:  # the loop is closed, and its readers with it
                for stream in group:
                    stream.close()


def _set_ready(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream._ready.set()


def merge(outputs: Sequence[Output]) -> Output:
    """One output with the tokens and text of several successive ones of a request."""
    if len(outputs) == 1:
        return outputs[0]
    return Output(
        outputs[0].sequence,
        tuple(token for output in outputs for token in output.tokens),
        "".join(output.text for output in outputs),
        outputs[-1].finish,
        tuple(entry for output in outputs for entry in output.logprobs),
    )
