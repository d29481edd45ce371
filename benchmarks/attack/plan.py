"""The requests of an attack, and the bounds of everything it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from d2sd.errors import D2SDError
from tools.hostile import grammars, malformed, prompts, sampling, sockets
from tools.hostile.case import Kind

#: All classes. Those that cost are sent first: afterwards the server must still be sound for the malformed ones.
EXPENSIVE = (*prompts.KINDS, *sampling.KINDS, *grammars.KINDS)
MALFORMED = (*malformed.KINDS, *sockets.KINDS)


@dataclass(frozen=True)
class Plan:
    """The bounds of an attack; times in seconds."""

    bundle: Path
    out: Path
    seed: int = 0
    clients: int = 4  # honest ones
    pause: float = 0.05  # between two questions of an honest client, on average
    quiet: int = 100  # questions of the honest clients before the attack
    slowdown: float = 3.0  # time to the first token of honest clients: p99 under attack over their quiet median
    growth: float = 1.2  # resident memory over that after the quiet phase
    most_memory: int = 4 << 30  # bytes; a server with more is killed
    timeout: float = 30.0  # of one request, and of the recovery after a class
    seconds: float = 60.0  # in which the requests of a class are sent
    options: tuple[str, ...] = ()  # more options of `d2sd serve`


def shares(expensive: int, malformed: int, only: Sequence[str] = ()) -> list[tuple[Kind, int]]:
    """How many requests of each class: those of a group have equal shares. `only` names the classes to send."""
    groups = ((EXPENSIVE, expensive), (MALFORMED, malformed))
    known = [kind.name for kinds, _ in groups for kind in kinds]
    if unknown := [name for name in only if name not in known]:
        raise D2SDError("There is no such class.", found=unknown[0], expected=", ".join(known))
    made = []
    for kinds, total in groups:
        chosen = [kind for kind in kinds if not only or kind.name in only]
        made += [(kind, total // len(chosen) + (n < total % len(chosen))) for n, kind in enumerate(chosen)]
    return [(kind, count) for kind, count in made if count]
