"""Reports the prefix cache and the load of an engine to Dynamo's router."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from d2sd.runtime.pages import Removed, Stored

if TYPE_CHECKING:
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.stats import EngineStats


class KVReporter:
    """Publishes pages that enter and leave the prefix cache, in order, and the use of the K/V pages.

    The router hashes the tokens itself; our hashes only have to be unique, and the same for the same prefix.
    """

    def __init__(self, engine: Engine, sdk: Any, publish: bool) -> None:
        """`publish` K/V events; the router then sends requests to the worker that has their prefix."""
        self._engine, self._sdk, self._publish = engine, sdk, publish
        self._page_size = engine.limits.page_size
        self._events: deque[Stored | Removed] = deque()
        self._publisher: Any = None
        self._last: EngineStats | None = None
        self.snapshots: Any = None  # Dynamo's SnapshotPublisher

    def sources(self) -> list[Any]:
        """The source that hands over Dynamo's publisher; none without events."""
        return [self._sdk.PushSource(on_ready=self._start, dp_rank=0)] if self._publish else []

    def _start(self, publisher: Any) -> None:
        """Nothing is cached yet: Dynamo calls this before it sends the first request."""
        self._publisher = publisher
        self._engine.scheduler.kv_cache.pages.cache.events = self._events

    def report(self) -> None:
        """Publish what has happened since the last call."""
        while self._events:
            self._send(self._events.popleft())
        stats = self._engine.stats
        if self.snapshots is not None and stats != self._last:
            self._last = stats
            snapshot = self._sdk.ComponentSnapshot(
                kv_used_blocks=stats.pages_used,
                kv_total_blocks=stats.pages_total,
                gpu_cache_usage=stats.pages_used / stats.pages_total,
                dp_rank=0,
                kv_cache_hit_rate=stats.prefix_hit_rate if stats.prefix_queried_tokens else None,
            )
            self.snapshots.publish(0, snapshot)

    def _send(self, event: Stored | Removed) -> None:
        if isinstance(event, Removed):
            self._publisher.publish_removed([block_hash(event.key)])
            return
        parent = None if event.parent is None else block_hash(event.parent)
        self._publisher.publish_stored(
            list(event.tokens), [self._page_size], [block_hash(event.key)], parent, cache_salt=event.salt or None
        )


def block_hash(key: bytes) -> int:
    """The signed 64-bit hash that stands for a page's key."""
    return int.from_bytes(key[:8], "little", signed=True)
