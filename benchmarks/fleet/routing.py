"""Routers: which worker a request goes to, with Dynamo's names of the modes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from benchmarks.fleet.worker import Stream, Worker
from d2sd.runtime.prefix_cache import extend_keys

RouterMode = Literal["round-robin", "least-loaded", "kv"]
ROUTER_MODES: tuple[RouterMode, ...] = get_args(RouterMode)


class Router:
    """Chooses among the workers that have room; ties go to each worker in turn."""

    def __init__(self, mode: RouterMode) -> None:
        self.mode, self._turn = mode, 0

    def choose(self, workers: Sequence[Worker], stream: Stream) -> Worker | None:
        """The worker for a stream; None if all are down or full."""
        self._turn += 1
        start = self._turn % len(workers)
        free = [one for one in (*workers[start:], *workers[:start]) if one.has_room]
        if not free or self.mode == "round-robin":
            return free[0] if free else None
        if self.mode == "least-loaded":
            return min(free, key=lambda worker: worker.load)
        return self._most_cached(free, stream)

    def _most_cached(self, free: Sequence[Worker], stream: Stream) -> Worker:
        """Dynamo's cost of a worker: pages of the prompt that it must prefill, and pages in use or wanted there.

        The router of Dynamo learns of cached pages by events; here it looks into the caches.
        """
        size, keys = free[0].limits.page_size, list[bytes]()
        tokens = (*stream.prompt, *(stream.token,) * stream.delivered)
        extend_keys(keys, tokens, size, (len(tokens) - 1) // size, "")

        def cost(worker: Worker) -> int:
            pages = worker.scheduler.pages
            waiting = sum(worker.limits.pages_for(len(one.tokens)) for one in worker.scheduler.waiting)
            return len(keys) - len(pages.cache.match(keys)) + pages.used + waiting

        return min(free, key=cost)
