"""Happens-before: who has seen what, and accesses to memory that nothing orders.

An actor (the host, or a stream) counts what it did; its clock says how much it is certain to have seen of every other.
A launch gives the stream all that the host has seen; an event keeps a stream's clock for who waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import ref


class Fault(AssertionError):
    """An order that a GPU may change in another run."""


@dataclass(eq=False)
class Actor:
    """The host or a stream."""

    name: str
    clock: dict[Actor, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock[self] = 0

    def advance(self) -> None:
        """Begin the next of its actions."""
        self.clock[self] += 1

    def join(self, clock: dict[Actor, int]) -> None:
        """Order all that happened before `clock` before all that it does from now on."""
        for actor, time in clock.items():
            if time > self.clock.get(actor, -1):
                self.clock[actor] = time

    def has_seen(self, actor: Actor, time: int) -> bool:
        return self.clock.get(actor, -1) >= time


@dataclass(eq=False)
class Memory:
    """One allocation, and who used it last."""

    name: str
    kind: str  # "device" or "pinned"
    home: Actor | None = None  # the stream whose later allocations may have it again, at once
    report: Callable[[str], None] | None = None  # told at the end what cannot be raised there
    written: tuple[Actor, int] | None = None
    read: dict[Actor, int] = field(default_factory=dict)
    owner: ref[object] | None = None  # what must live for it to be used
    #: Streams that the allocator waits for before it hands the memory on.
    recorded: set[Actor] = field(default_factory=set)

    def reads(self, by: Actor) -> None:
        """Raises Fault."""
        self._check_owner()
        if self.written is None:
            raise Fault(f"{by.name} reads {self.name} before it was written")
        if not by.has_seen(*self.written):
            raise Fault(f"{by.name} reads {self.name}, which {self.written[0].name} may still write")
        self.read[by] = by.clock[by]

    def writes(self, by: Actor) -> None:
        """Raises Fault."""
        self._check_owner()
        if self.written is not None and not by.has_seen(*self.written):
            raise Fault(f"{by.name} writes {self.name}, which {self.written[0].name} may still write")
        for reader, time in self.read.items():
            if not by.has_seen(reader, time):
                raise Fault(f"{by.name} writes {self.name}, which {reader.name} may still read")
        self.read = {}
        self.written = by, by.clock[by]

    def _check_owner(self) -> None:
        if self.owner is not None and self.owner() is None:
            raise Fault(f"{self.name} is used, which is gone")

    def __del__(self) -> None:
        """The allocator keeps pinned memory until copies are done; memory of a device goes to its stream at once."""
        if self.home is None or self.report is None:
            return
        used = [*self.read.items(), *([self.written] if self.written else [])]
        for actor, time in used:
            if actor not in self.recorded and not self.home.has_seen(actor, time):
                self.report(f"{self.name} of {self.home.name} is freed while {actor.name} may use it")
