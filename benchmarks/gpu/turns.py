"""Turns on a GPU between processes: what is timed runs alone, what only has to be right runs beside others.

The file that D2SD_GPU_TURNS names is the lock; a shell holds it for a training by `flock -s`. Without that variable
nothing waits.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "D2SD_GPU_TURNS"


@contextmanager
def turn(*, alone: bool) -> Iterator[float]:
    """Wait for the GPU, and keep others from it if `alone`; gives the seconds that it took."""
    begun, path = time.time(), os.environ.get(VARIABLE)
    if not path:
        yield 0.0
        return
    with Path(path).open("a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield time.time() - begun
