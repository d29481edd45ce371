"""Shows that kernels ran: the suite's figures are theirs, or the case is refused.

The whole suite runs under `D2SD_NO_FALLBACK=1`. A part that needs kernels first asks the dispatcher, even if it
launches them past it; and a case in which none was launched is not ok, whatever it found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch

from d2sd.plugins import dispatch

#: In place of a GPU's in a dry run.
HOPPER = (9, 0)


def forbid_fallbacks() -> None:
    """Set it before anything is made: a runner asks when it is loaded."""
    os.environ[dispatch.NO_FALLBACK] = "1"


def refusal(capability: tuple[int, int] | None = None) -> str | None:
    """Why the dispatcher takes no kernel on this GPU, or on one of `capability`; None where it does."""
    return dispatch.unsupported(128, torch.bfloat16, capability or torch.cuda.get_device_capability())


class Launches:
    """Counts the launches of a case, of kernels of d2sd alone."""

    count = 0

    def add(self, *_: Any, **__: Any) -> None:
        self.count += 1


#: Of the case that runs.
LAUNCHES = Launches()


@contextmanager
def counted() -> Iterator[Launches]:
    """Count from 0. A graph's replays are none, its capture is."""
    LAUNCHES.count = 0
    if find_spec("triton") is None:
        yield LAUNCHES
        return
    from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

    launch = JITFunction.run

    def run(kernel: Any, *args: Any, **options: Any) -> Any:
        if kernel.fn.__module__.startswith("d2sd."):
            LAUNCHES.add()
        return launch(kernel, *args, **options)

    with patch.object(JITFunction, "run", run):
        yield LAUNCHES
