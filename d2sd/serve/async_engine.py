"""The engine as a service: one thread owns it, requests arrive from an event loop between two steps.

event loop                       engine's thread
submit -> inbox  ------------->  engine.submit
                                 engine.step
Stream.__anext__ <- wake <-----  Stream.push
close -> inbox   ------------->  engine.cancel
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import TYPE_CHECKING, Literal

from d2sd.errors import D2SDError, GenerationError, RequestError
from d2sd.progress import bar
from d2sd.runtime.sequence import Output
from d2sd.serve.admission import Admission
from d2sd.serve.errors import DeadlineExceeded, EngineFailed, ShuttingDown
from d2sd.serve.stream import Stream, Watch

if TYPE_CHECKING:
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.request import Request
    from d2sd.runtime.sequence import Sequence as Running

logger = logging.getLogger(__name__)

#: Seconds for the step that runs when all requests are ended; a step of a GPU that hangs never ends.
_LAST_STEP = 10.0
#: What the inbox carries: take this request, drop it, end all requests, end the thread.
_Message = tuple[Literal["submit", "cancel", "end", "stop"], "Stream | None"]


class AsyncEngine:
    """Runs an engine in a thread of its own; the engine must not be used from elsewhere while it runs.

    Args:
        engine: the engine to own.
        max_waiting: requests accepted in addition to the `max_batch` that can run; more raise `QueueFull`.

    Methods may be called from several event loops.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 256) -> None:
        self.engine = engine
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        not_started = EngineFailed("The engine has not been started.", fix="await start()")
        self._admission = Admission(engine.limits.max_batch, max_waiting, not_started)
        self._running: dict[Running, Stream] = {}  # of the engine's thread alone
        self._thread: Thread | None = None
        self._failure: str | None = None

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(self, request: Request, *, deadline: float | None = None) -> AsyncGenerator[Output, None]:
        """Yield the outputs of a request; `deadline` is in seconds from now.

        When the caller closes the generator, or its task is cancelled, the request is cancelled before the next step.

        Raises:
            RequestError: the engine can never serve the request.
            QueueFull: too many requests are waiting.
            DeadlineExceeded: the deadline passed; tokens until then have been yielded.
            GenerationError: the request's own grammar or text failed.
            ShuttingDown: the engine is being stopped.
            EngineFailed: the engine stopped on an error; `health` has its reason.
        """
        (stream,) = self.submit([request], deadline=deadline)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    def submit(
        self,
        requests: Sequence[Request],
        *,
        deadline: float | None = None,
        watch: Watch | None = None,
        interval: int = 1,
    ) -> list[Stream]:
        """Queue all requests, or none if one is refused; the caller must iterate or `close` every stream.

        Raises what `generate` raises before its first output. `watch` is called in the engine's thread with each step.
        A waiting reader is woken by the first output, then by at least `interval` tokens or the end.
        """
        for request in requests:
            self.engine.check(request)
        if deadline is not None and not deadline > 0:
            raise RequestError(
                "the deadline is not in the future", where="deadline", found=deadline, expected="above 0"
            )
        expires = None if deadline is None else time.monotonic() + deadline

        def abandon(stream: Stream) -> None:
            self._inbox.put(("cancel", stream))

        streams = [Stream(request, abandon, expires, watch, interval) for request in requests]
        self._admission.add(streams)
        for stream in streams:
            self._inbox.put(("submit", stream))
        return streams

    # -- life ----------------------------------------------------------------------------------------------------------

    @property
    def health(self) -> str | None:
        """None while the engine works, else the reason why it does not."""
        if self._failure is not None:
            return self._failure
        return None if self._thread is not None and self._thread.is_alive() else "The engine is not running."

    @property
    def accepting(self) -> bool:
        """Whether new requests are accepted: the engine works and is not being drained."""
        return self._admission.refusal is None

    @property
    def live(self) -> int:
        """Requests accepted and not ended."""
        return len(self._admission)

    async def start(self) -> None:
        """Warm the engine up and start the thread. It can be started again after `stop`, not after a failure."""
        self._check_startable()
        await asyncio.to_thread(self.engine.warm_up, bar)
        self.launch()

    def launch(self) -> None:
        """Start the thread without a warm-up: on a GPU, steps are captured when they first run."""
        self._check_startable()
        self._admission.refuse(None)
        self.engine.runner.on_failure(self._fail)
        self._thread = Thread(target=self._run, name="d2sd-engine", daemon=True)
        self._thread.start()

    def _check_startable(self) -> None:
        if self._failure is not None or (self._thread is not None and self._thread.is_alive()):
            raise EngineFailed("The engine cannot be started.", found=self._failure or "it is running")

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, wait up to `timeout` seconds for those accepted, then end the rest with ShuttingDown.

        The step that runs may go on for seconds; if it never ends, its requests end without it.
        """
        self._admission.refuse(_shutting_down())
        if not await self._admission.emptied(timeout):
            self._inbox.put(("end", None))
            if not await self._admission.emptied(_LAST_STEP):
                self._end_all(_shutting_down(), release=False)

    async def stop(self) -> None:
        """End all requests with ShuttingDown and the thread with them; returns when it has ended, or its step hangs."""
        await asyncio.to_thread(self.halt, _LAST_STEP)

    def halt(self, timeout: float | None = None) -> None:
        """Do as `stop`, without an event loop. In the engine's thread itself, return at once."""
        self._admission.refuse(_shutting_down())
        if self._thread is not None:
            self._inbox.put(("stop", None))
            if self._thread is not current_thread():
                self._thread.join(timeout)

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._read_inbox():
                self._expire()
                self.engine.record_trace = any(stream.watch for stream in self._running.values())
                if self.engine.busy:
                    self._deliver(self.engine.step())
        except BaseException as error:  # reported to every reader and by `health`
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Tell every reader, and `health`, why the engine ended; also from another thread while a step is stuck."""
        failure = f"{type(error).__name__}: {error}"[:500]
        failed = EngineFailed("The engine failed; the server must be restarted.", found=failure)
        if not self._admission.refuse(failed, final=True):
            return
        self._failure = failure
        logger.error("the engine failed", exc_info=error)
        self._end_all(failed, release=False)
        self._inbox.put(("stop", None))

    def _read_inbox(self) -> bool:
        """Process the messages that are there, and wait for one while the engine is idle. False: end the thread."""
        while True:
            try:
                kind, stream = self._inbox.get(block=not self.engine.busy)
            except Empty:
                return True
            if kind == "submit" and stream is not None:
                self._take(stream)
            elif kind == "cancel" and stream is not None:
                self._end(stream)
                Stream.wake([stream])
            else:
                self._end_all(_shutting_down())
                if kind == "stop":
                    return False

    def _take(self, stream: Stream) -> None:
        if stream.ended:
            return
        try:
            stream.sequence = self.engine.submit(stream.request)
        except D2SDError as error:
            self._end(stream, error)
            Stream.wake([stream])
        else:
            self._running[stream.sequence] = stream

    def _expire(self) -> None:
        """End the requests whose deadline has passed."""
        now = time.monotonic()
        for stream in [s for s in self._running.values() if s.expires is not None and s.expires < now]:
            self._end(stream, DeadlineExceeded("The request did not finish within its deadline.", where="deadline"))
            Stream.wake([stream])

    def _deliver(self, outputs: list[Output]) -> None:
        streams = []
        for output in outputs:
            stream = self._running[output.sequence]
            if stream.watch is not None and self.engine.trace is not None:
                try:
                    stream.watch(self.engine.trace, output)
                except Exception as error:  # of this request alone
                    self._end(stream, GenerationError.of(error))
                    streams.append(stream)
                    continue
            if stream.push(output):
                streams.append(stream)
            if output.finish is not None:
                self._end(stream, output.sequence.error)
        Stream.wake(streams)

    def _end(self, stream: Stream, error: D2SDError | None = None, *, release: bool = True) -> None:
        """End a stream and, to release its pages, remove its request from the engine; the caller wakes the reader."""
        if stream.sequence is not None and release:
            self.engine.cancel(stream.sequence, error)
            self._running.pop(stream.sequence, None)
        stream.end(error)
        self._admission.discard(stream)

    def _end_all(self, error: D2SDError, *, release: bool = True) -> None:
        # what is not live any more but runs was given up by `drain`
        streams = [*self._admission.streams.union(self._running.values() if release else ())]
        for stream in streams:
            self._end(stream, error, release=release)
        Stream.wake(streams)


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("The server is shutting down.", fix="try again later")
