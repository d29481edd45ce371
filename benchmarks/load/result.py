"""`serving.json`: every load on every server that was measured in one run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

from benchmarks.load.figures import Figures, Sample, Slo
from d2sd.bench.result import Part, Provenance, ResultFile

Workload = Literal["prompts", "poisson", "prefix", "turns"]


class Variant(NamedTuple):
    """How a server was started."""

    policy: str
    prefix_cache: bool

    def __str__(self) -> str:
        return self.policy if self.prefix_cache else f"{self.policy}, no prefix cache"

    @property
    def options(self) -> list[str]:
        """Options of `d2sd serve`."""
        return ["--policy", self.policy, *([] if self.prefix_cache else ["--no-prefix-cache"])]


class Key(NamedTuple):
    """A load on a server: `amount` is the concurrency, or the rate in requests a second of `poisson`."""

    variant: Variant
    workload: Workload
    amount: float

    def __str__(self) -> str:
        return f"{self.workload} {self.load}, {self.variant}"

    @property
    def load(self) -> str:
        return f"{self.amount:g} requests/s" if self.workload == "poisson" else f"{self.amount:g} in flight"


class Run(Part):
    """One measurement of a load."""

    samples: list[Sample]
    seconds: float
    cpu_seconds: float | None

    def figures(self, slo: Slo) -> Figures:
        return Figures.of(self.samples, self.seconds, self.cpu_seconds, slo)


class Cell(Part):
    """All runs of a load on a server; the figures are of the run with the median time."""

    key: Key
    figures: Figures
    runs: list[Run]

    @classmethod
    def of(cls, key: Key, runs: Sequence[Run], slo: Slo) -> Cell:
        ranked = sorted(runs, key=lambda run: run.seconds)
        return cls(key=key, figures=ranked[(len(runs) - 1) // 2].figures(slo), runs=list(runs))


class Result(ResultFile):
    """`serving.json`."""

    provenance: Provenance
    settings: dict[str, Any]
    slo: Slo
    cells: list[Cell]

    def baseline(self, cell: Cell) -> Cell | None:
        """The cell to compare with: without the prefix cache where it is what is varied, else without speculation."""
        policy, workload, amount = cell.key.variant.policy, cell.key.workload, cell.key.amount
        other = Variant(policy, False) if workload in ("prefix", "turns") else Variant("off", True)
        keys = {one.key: one for one in self.cells}
        found = keys.get(Key(other, workload, amount))
        return None if found is cell else found

    def gain(self, cell: Cell, figure: str) -> float | None:
        """Median over runs of baseline / cell, for a figure of which less is better, such as `cpu_per_token`.

        Runs of a number were made one after the other, so a slow period of the machine slows both.
        """
        baseline = self.baseline(cell)
        if baseline is None:
            return None
        pairs = [
            (_figure(one, figure, self.slo), _figure(other, figure, self.slo))
            for one, other in zip(cell.runs, baseline.runs, strict=True)
        ]
        return median(other / one for one, other in pairs if one and other) if all(a and b for a, b in pairs) else None


def _figure(run: Run, name: str, slo: Slo) -> float | None:
    figures = run.figures(slo)
    if name == "seconds_per_token":
        return 1 / figures.tokens_per_second if figures.tokens_per_second else None
    value = figures
    for part in name.split("."):
        value = getattr(value, part)
    return value  # type: ignore[return-value]
