"""An engine whose steps a test holds, and whether one has nothing left to do."""

from __future__ import annotations

from threading import Event

from d2sd.runtime.engine import Engine
from d2sd.runtime.sequence import Output


class Held:
    """Holds an engine before each step until `open` is set, and counts the steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.steps, self.reached, self.open = engine, 0, Event(), Event()
        self.step = engine.step  # what is done once it may
        engine.step = self._held  # type: ignore[method-assign]

    def _held(self) -> list[Output]:
        self.reached.set()
        assert self.open.wait(20)
        self.steps += 1
        return self.step()


def idle(engine: Engine) -> bool:
    """Whether nothing is queued and every page is free."""
    cache = engine.scheduler.kv_cache
    return not engine.busy and cache.pages.free == cache.page_count - 1
