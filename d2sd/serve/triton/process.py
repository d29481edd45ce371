"""The process of the model: it logs to stderr and ends with the server."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from threading import Thread

#: Seconds between two looks at the parent.
_PERIOD = 0.5


def exit_with_parent(getppid: Callable[[], int] = os.getppid, leave: Callable[[int], None] = os._exit) -> Thread:
    """Start a thread that ends this process when its parent has ended: an orphan would keep the GPU.

    Triton leaves its model processes behind when it is killed, and when its exit timeout expires.
    """
    parent = getppid()

    def watch() -> None:
        while getppid() == parent:
            time.sleep(_PERIOD)
        leave(1)

    thread = Thread(target=watch, name="d2sd-parent", daemon=True)
    thread.start()
    return thread


def log_to_stderr() -> None:
    """Write warnings and the logs of d2sd to stderr, which Triton passes on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("d2sd")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
