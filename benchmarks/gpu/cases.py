"""Runs the cases of one part, one after the other, until its time is up."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.gpu.evidence import counted
from benchmarks.gpu.record import Record
from d2sd.plugins.dispatch import NoKernel

#: Exit status of a process whose CUDA context was lost in a failure.
LOST = 3
#: Adds to the row of the case that runs, so that what a later step loses does not take it along.
Note = Callable[..., None]
#: Measures; the row's figures, or raises.
Measure = Callable[[Note], dict[str, Any]]
Case = tuple[str, Measure]


class Skip(Exception):
    """The case cannot be measured here, for the reason in the message."""


class Refused(Exception):
    """Kernels of d2sd, which were to be measured, would not run."""


def run_cases(record: Record, cases: Iterable[Case], until: float, *, launches: bool = False) -> None:
    """Measure the cases that the record does not hold yet; none is begun past `until` (seconds of `time.time`).

    `launches`: a case in which no kernel of d2sd was launched is refused.

    Leaves the process with status LOST where a failure took the device's context with it: all that follows would fail.
    """
    for key, measure in cases:
        if key in record.rows:
            continue
        if time.time() >= until:
            record.put(key, "no time", reason="the time of this part was up")
            continue
        record.put(key, "started")

        def note(key: str = key, **figures: Any) -> None:
            record.put(key, "started", **figures)

        begun = time.time()
        try:
            with counted() as seen:
                figures = measure(note)
            if launches and not seen.count:
                raise Refused("no kernel of d2sd was launched")
        except Skip as reason:
            record.put(key, "skipped", reason=str(reason))
        except (Refused, NoKernel) as reason:
            record.put(key, "refused", reason=str(getattr(reason, "found", reason)))
        except Exception as error:
            record.put(key, "failed", reason=said(error))
            if not _device_lives():
                sys.exit(LOST)
        else:
            record.put(key, "ok", seconds=round(time.time() - begun, 2), **figures)
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()


def said(error: BaseException) -> str:
    """Type and first line of an error, short enough for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def _device_lives() -> bool:
    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True
