"""Orders of blocks that a GPU could take, for kernels whose blocks tell each other something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tools.ptxsim import machine

#: How likely a block runs in a turn: some come when others have waited and left, and some leave late.
PACES = (0.02, 0.2, 1.0)


@contextmanager
def in_order(order: str | int | None) -> Iterator[None]:
    """Chooses which unfinished blocks run: the first, the last, each at a random pace by this seed, or all for None."""
    draw = np.random.default_rng(order if isinstance(order, int) else 0)
    paces = draw.choice(PACES, 1024)  # of more blocks than any case has

    def choose(blocks: Any) -> Any:
        ready = np.flatnonzero(blocks)
        if isinstance(order, int):
            kept = ready[draw.random(len(ready)) < paces[ready]]
            kept = kept if len(kept) else draw.choice(ready, 1)
        else:
            kept = ready[:1] if order == "first" else ready[-1:]
        return np.isin(np.arange(len(blocks)), kept)

    machine.CHOOSE = None if order is None else choose
    try:
        yield
    finally:
        machine.CHOOSE = None
