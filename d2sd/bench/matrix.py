"""The cells of a benchmark: methods x node budgets x prompt sets x temperatures x concurrencies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from d2sd.bench.result import Key
from d2sd.policies import FACTS

#: Methods whose tree grows with the node budget; the others have a fixed size.
GROWING = tuple(name for name, facts in FACTS.items() if facts.grows)


@dataclass(frozen=True, slots=True)
class Matrix:
    """The axes. Plain decoding is always among the methods, as the baseline.

    A method written `name:rows` has this one budget.
    """

    methods: Sequence[str]
    rows: Sequence[int]
    sets: Sequence[str]
    temperatures: Sequence[float]
    concurrencies: Sequence[int]
    block_size: int

    def keys(self) -> list[Key]:
        """Every cell once; plain decoding first in each set, the lowest concurrency first."""
        cells = (
            Key(method, rows, name, temperature, concurrency)
            for temperature in self.temperatures
            for concurrency in sorted(self.concurrencies)
            for name in self.sets
            for method, rows in (("off", 1), *self._trees())
        )
        return list(dict.fromkeys(cells))

    def _trees(self) -> Iterator[tuple[str, int]]:
        for written in self.methods:
            method, _, pinned = written.partition(":")
            rows = (int(pinned),) if pinned else self.rows
            if method in GROWING:
                yield from ((method, one) for one in rows)
            elif method == "auto":
                yield method, max(rows)
            elif method != "off":
                yield method, min(self.block_size, max(rows))
