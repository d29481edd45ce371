"""A few malformed requests of every class, for the soak test."""

from __future__ import annotations

from collections import Counter

from benchmarks.attack.send import send
from benchmarks.attack.verdicts import of_statuses
from tools.hostile import malformed, sockets
from tools.hostile.case import Scene

_KINDS = (*malformed.KINDS, *sockets.KINDS)
_SCENE = Scene(vocab=100, context=256)
#: Seconds of a request, and of all requests of a class.
_TIMEOUT, _SECONDS = 60.0, 600.0


async def fuzz(url: str, seed: int, requests: int) -> tuple[Counter[str], list[str]]:
    """Send at least so many requests, as many of every class: outcomes by name, and the faults."""
    outcomes, faults = Counter[str](), list[str]()
    for kind in _KINDS:
        cases = [kind.case(seed, number, _SCENE) for number in range(-(-requests // len(_KINDS)))]
        sent = await send(url, kind, cases, seed, _SCENE, _TIMEOUT, _SECONDS)
        outcomes.update(f"{kind.name}: {one.outcome}" for one in sent)
        faults += of_statuses(sent)
    return outcomes, faults
