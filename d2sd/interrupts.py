"""Ctrl-C that is not lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noting_interrupts() -> Iterator[Callable[[], bool]]:
    """Yield whether Ctrl-C was pressed inside the block, where it raises KeyboardInterrupt as always.

    Libraries turn that into errors of their own, or swallow it and fail later, as an import does that finds half of
    itself imported.
    """
    came = list[int]()

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job ignores it
    usual = usual and threading.current_thread() is threading.main_thread()
    if usual:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(came)
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
