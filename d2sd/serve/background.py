"""An event loop in a thread: it runs coroutines for callers that have no event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")

_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process: a forked one has no thread of its parent


def submit(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Begin a coroutine; cancelling the future cancels it. Takes no lock, so that a finalizer may call it."""
    process = os.getpid()
    if process not in _loops:
        made = asyncio.new_event_loop()
        if _loops.setdefault(process, made) is made:
            Thread(target=made.run_forever, name="d2sd-callers", daemon=True).start()
        else:  # another thread was first
            made.close()
    return asyncio.run_coroutine_threadsafe(coroutine, _loops[process])


def wait(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; an exception that interrupts the caller, such as KeyboardInterrupt, cancels it."""
    future = submit(coroutine)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
