"""One simulated worker: the runtime's own scheduler, page allocator and prefix cache, with a cost model for the models.

Nothing of the scheduling is imitated: admission, prefill budget, page growth, preemption, prefix hits and eviction are
those of `d2sd.runtime.scheduler`. Only the forward passes are replaced, by their time and by drawn accepted lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal

from benchmarks.fleet.costs import WorkerModel
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.scheduler import Scheduler
from d2sd.runtime.sequence import Sequence

#: How a request ends. It fails if it was moved too often, or could not be moved because all workers were full.
Outcome = Literal["finished", "refused", "failed"]


@dataclass(slots=True, eq=False)
class Stream:
    """One request as its client sees it; it may move from worker to worker."""

    id: int
    arrival: float  # seconds; of a closed loop: set when it is sent
    prompt: tuple[int, ...]
    max_tokens: int
    profile: int  # which distribution of accepted lengths its text has
    draws: list[int]  # by position in the answer: accepted lengths are a function of the text, as in the engine
    chunks: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens) that the client received
    delivered: int = 0
    moves: int = 0  # workers that it lost
    end: float = 0.0
    outcome: Outcome | None = None

    @property
    def token(self) -> int:
        """Token id of all of its own text: no two requests share a page of it."""
        return self.id + 1_000_000


@dataclass(slots=True)
class Totals:
    """Sums over the steps of a worker, those before a kill included."""

    request_steps: int = 0  # decode steps of a request: a step that serves three counts three times
    busy: float = 0.0  # seconds
    prefill_tokens: int = 0  # computed: not found in the prefix cache
    queried_tokens: int = 0  # prompt tokens looked up in the prefix cache
    hit_tokens: int = 0
    lost_tokens: int = 0  # of context, computed or in computation when the worker was killed
    preemptions: int = 0
    pages: list[int] = field(default_factory=list)  # in use, step by step


class Worker:
    """Steps while it has requests. A killed worker loses everything; `restart` gives it an empty cache."""

    def __init__(self, model: WorkerModel, limits: Limits, pages: int, max_waiting: int) -> None:
        self.model, self.limits = model, limits
        self.alive, self.stepping = True, False
        self.generation = 0  # kills so far: the end of a step of an earlier one is void
        self.totals = Totals()
        self._pages, self._room, self._numbers = pages, limits.max_batch + max_waiting, count()
        self._begin()

    def _begin(self) -> None:
        self.scheduler = Scheduler(self.limits, self.model.block_size, self._pages + 1)
        self.streams: dict[Sequence, Stream] = {}
        self._decoding: list[Sequence] = []

    @property
    def load(self) -> int:
        """Requests running and waiting."""
        return len(self.streams)

    @property
    def has_room(self) -> bool:
        return self.alive and len(self.streams) < self._room

    def submit(self, stream: Stream) -> None:
        """Queue a stream: its prompt and, if it moved here, the answer so far. Raises RequestError if it cannot fit."""
        prompt = stream.prompt + (stream.token,) * stream.delivered
        request = Request(prompt, stream.max_tokens - stream.delivered)
        sequence = Sequence(next(self._numbers), request, list(prompt))
        self.scheduler.add(sequence)
        self.streams[sequence] = stream

    def begin_step(self) -> float | None:
        """Schedule a step and return its seconds; None if there is nothing to do."""
        if not self.streams:
            return None
        schedule = self.scheduler.schedule()
        while not schedule.prefill and not schedule.decode:  # it preempted the only request that runs
            schedule = self.scheduler.schedule()
        seconds, rows = 0.0, sum(tokens for _, tokens in schedule.prefill)
        if rows:
            context = sum(sequence.cached * tokens for sequence, tokens in schedule.prefill) // rows
            seconds = self.model.prefill_seconds(rows, context)
            for sequence, tokens in schedule.prefill:
                sequence.cached += tokens
        self._decoding, totals = schedule.decode, self.totals
        if self._decoding:
            seconds += self.model.decode_seconds(len(self._decoding), sum(s.cached for s in self._decoding))
        totals.busy += seconds
        totals.request_steps += len(self._decoding)
        totals.prefill_tokens += rows
        totals.pages.append(self.scheduler.pages.used)
        self.stepping = True
        return seconds

    def end_step(self, now: float) -> list[Stream]:
        """Deliver the tokens of the step; returns the streams that it finished."""
        self.stepping, finished = False, list[Stream]()
        if not self._decoding:
            return finished
        lengths = self.model.lengths(len(self._decoding))
        for sequence in self._decoding:
            stream = self.streams[sequence]
            accepted = lengths[stream.profile % len(lengths)][stream.draws[stream.delivered]]
            taken = min(accepted, stream.max_tokens - stream.delivered)
            sequence.cached += accepted
            sequence.tokens += [stream.token] * taken
            stream.delivered += taken
            stream.chunks.append((now, taken))
            if stream.delivered == stream.max_tokens:
                sequence.finish = "length"
                self.scheduler.remove(sequence)
                del self.streams[sequence]
                finished.append(stream)
        return finished

    def counted(self) -> Totals:
        """The totals, with what the scheduler has counted."""
        stats, totals = self.scheduler.stats(""), self.totals
        return replace(
            totals, queried_tokens=totals.queried_tokens + stats.prefix_queried_tokens,
            hit_tokens=totals.hit_tokens + stats.prefix_hit_tokens, preemptions=totals.preemptions + stats.preemptions,
        )  # fmt: skip

    def kill(self) -> list[Stream]:
        """SIGKILL: K/V, queue and the step in progress are gone. Returns the streams that were here."""
        lost = list(self.streams.values())
        self.totals = self.counted()
        self.totals.lost_tokens += sum(sequence.cached for sequence in self.streams)
        self.alive, self.stepping = False, False
        self.generation += 1
        self._begin()
        return lost

    def restart(self) -> None:
        """Ready again, with an empty prefix cache."""
        self.alive = True
