"""Discrete-event simulation of a fleet: a router and 1 .. N workers, under open or closed loop, with killed workers.

Events are arrivals, ends of steps, kills, moves and restarts. A killed worker's streams go to other workers as in
NVIDIA Dynamo: after `move_seconds` the prompt and the answer so far are sent as one prompt, and the stream goes on
with the text that it would have had; a stream that loses more than `migration_limit` workers fails. New requests that
find all workers full are refused (Dynamo's 529). Time of router, network and tokenizer is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from benchmarks.fleet.costs import WorkerModel
from benchmarks.fleet.routing import Router, RouterMode
from benchmarks.fleet.worker import Outcome, Stream, Worker
from d2sd.runtime.request import Limits


class Kill(NamedTuple):
    """SIGKILL of a worker."""

    at: float  # seconds
    worker: int = 0


class Fleet(BaseModel):
    """What is simulated besides costs and load."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    limits: Limits
    pages: Annotated[int, Field(ge=1)]  # K/V pages of a worker
    workers: Annotated[int, Field(ge=1)] = 1
    router: RouterMode = "least-loaded"
    max_waiting: Annotated[int, Field(ge=0)] = 256  # requests that wait at a worker; more are refused
    kills: tuple[Kill, ...] = ()
    restart_seconds: Annotated[float, Field(ge=0)] = 30.0  # from a kill until the worker is ready again
    move_seconds: Annotated[float, Field(ge=0)] = 0.01  # until a stream of a killed worker is sent elsewhere
    migration_limit: Annotated[int, Field(ge=0)] = 3  # workers that a stream may lose


class Simulation:
    """One run. `run` may be called once."""

    def __init__(self, model: WorkerModel, fleet: Fleet) -> None:
        self.fleet, self.now = fleet, 0.0
        self.workers = [Worker(model, fleet.limits, fleet.pages, fleet.max_waiting) for _ in range(fleet.workers)]
        self._router = Router(fleet.router)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._ready: dict[Worker, None] = {}  # workers that may begin a step now, in order
        self._users: list[Stream] = []  # requests that a closed loop has not sent yet, the next one last
        self._open = 0

    def run(self, streams: list[Stream], concurrency: int | None = None) -> None:
        """Serve all requests to their end: at their times of arrival, or `concurrency` of them at a time."""
        for kill in self.fleet.kills:
            self._at(kill.at, self._kill, self.workers[kill.worker])
        self._open = len(streams)
        if concurrency is None:
            for stream in streams:
                self._at(stream.arrival, self._send, stream)
        else:
            self._users = streams[::-1]
            for _ in range(min(concurrency, len(streams))):
                self._next_user()
        while self._open:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:  # all of a moment, before a step begins
                _, _, handler, arguments = heappop(self._events)
                handler(*arguments)
            ready, self._ready = self._ready, {}
            for worker in ready:
                self._begin_step(worker)

    def _at(self, time: float, handler: Callable[..., None], *arguments: Any) -> None:
        heappush(self._events, (time, next(self._order), handler, arguments))

    def _next_user(self) -> None:
        if self._users:
            stream = self._users.pop()
            stream.arrival = self.now
            self._at(self.now, self._send, stream)

    def _send(self, stream: Stream) -> None:
        """Give a new or moved stream to a worker; without one it ends."""
        worker = self._router.choose(self.workers, stream)
        if worker is None:
            self._close(stream, "failed" if stream.moves else "refused")
            return
        worker.submit(stream)
        self._ready[worker] = None

    def _close(self, stream: Stream, outcome: Outcome) -> None:
        stream.end, stream.outcome = self.now, outcome
        self._open -= 1
        self._next_user()

    def _begin_step(self, worker: Worker) -> None:
        if worker.alive and not worker.stepping and (seconds := worker.begin_step()) is not None:
            self._at(self.now + seconds, self._end_step, worker, worker.generation)

    def _end_step(self, worker: Worker, generation: int) -> None:
        if worker.generation != generation:
            return  # it was killed during this step
        for stream in worker.end_step(self.now):
            self._close(stream, "finished")
        self._ready[worker] = None

    def _kill(self, worker: Worker) -> None:
        for stream in worker.kill():
            stream.moves += 1
            if stream.moves > self.fleet.migration_limit:
                self._close(stream, "failed")
            else:
                self._at(self.now + self.fleet.move_seconds, self._send, stream)
        self._at(self.now + self.fleet.restart_seconds, worker.restart)
