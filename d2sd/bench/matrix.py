"""What is measured: methods x row budgets x prompt sets x temperatures x concurrencies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from d2sd.bench.result import Key

#: Methods whose tree grows with the budget; the others have the rows they have.
GROWING = ("samples", "reanchor", "d2sd", "ddtree", "hybrid")


@dataclass(frozen=True, slots=True)
class Matrix:
    """The axes. Plain decoding is always among the methods: the others are held against it.

    A method written `name:rows` has this one budget.
    """

    methods: Sequence[str]
    rows: Sequence[int]
    sets: Sequence[str]
    temperatures: Sequence[float]
    concurrencies: Sequence[int]
    block_size: int

    def keys(self) -> Iterator[Key]:
        """Every cell once, plain decoding first in each set, temperature and concurrency."""
        for temperature in self.temperatures:
            for concurrency in self.concurrencies:
                for name in self.sets:
                    yield Key("off", 1, name, temperature, concurrency)
                    for method, rows in self._trees():
                        yield Key(method, rows, name, temperature, concurrency)

    def _trees(self) -> Iterator[tuple[str, int]]:
        for written in self.methods:
            method, _, pinned = written.partition(":")
            if pinned:
                yield method, int(pinned)
            elif method in GROWING:
                yield from ((method, rows) for rows in self.rows)
            elif method != "off":
                yield method, max(self.rows) if method == "auto" else self.block_size
