"""Compiles the grammars of requests apart from other work, each once however many requests wait for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event

from d2sd.errors import RequestError
from d2sd.runtime.grammar.forms import StructuredOutputsParams
from d2sd.serve.structured import GrammarCompiler
from d2sd.serve.turns import Turns


@dataclass(slots=True)
class _Job:
    task: asyncio.Task[object]
    stop: Event = field(default_factory=Event)
    waiting: int = 0  # requests


class Grammars:
    """Prepares grammars so that `GrammarCompiler.compile` has them, or why they are refused, at once."""

    def __init__(self, compiler: GrammarCompiler, turns: Turns) -> None:
        self._compiler, self._turns = compiler, turns
        self._jobs: dict[bytes, _Job] = {}

    async def prepare(self, client: str, form: StructuredOutputsParams) -> None:
        """Compile the grammar of a form, in the client's turn. Work whose requests have all gone is ended.

        Raises `Busy`, or D2SDError if llguidance is not installed.
        """
        if self._compiler.knows(form):
            return
        key = form.digest
        job = self._jobs.get(key)
        if job is None:
            stop = Event()
            work = self._turns.run(client, self._compiler.compile, form, "structured_outputs", stop)
            job = self._jobs[key] = _Job(asyncio.ensure_future(work), stop)
        job.waiting += 1
        try:
            with suppress(RequestError):  # remembered: `compile` raises it with the field of each request
                await asyncio.shield(job.task)
        finally:
            job.waiting -= 1
            if not job.waiting:
                if self._jobs.get(key) is job:
                    del self._jobs[key]
                job.stop.set()
                job.task.cancel()
