"""The table at the end of `d2sd bench`: figures counted by hand, and sentences that fit the device."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from d2sd.bench.result import Difference
from d2sd.bench.summary import remarks, summary
from d2sd.bench.tables import detail_table
from tests.d2sd.bench.helpers import PROVENANCE, cell, result

PLAIN = cell("off", [1] * 8, verified_rows=8, stage_seconds={"verify": 8.0, "prefill": 9.0}, steps=8, wall_seconds=10.0)
WIDE = cell("hybrid", [4, 4], rows=64, verified_rows=128, stage_seconds={"verify": 6.0}, steps=2, wall_seconds=8.0)
NARROW = WIDE.model_copy(update={"rows": 16})


def rows_of(table: Table) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as text:
        console.print(table)
    return [[part.strip() for part in line.strip("│").split("│")] for line in text.get().splitlines() if "│" in line]


def test_every_policy_at_its_largest_budget() -> None:
    warm = WIDE.model_copy(update={"temperature": 1.0, "wall_seconds": 1.0})
    assert rows_of(summary(result(PLAIN, NARROW, WIDE, warm))) == [
        ["off", "1", "1", "1.00", "1.00", "0.8", "1.00"],
        ["hybrid", "64", "64", "4.00", "3.00", "1.0", "1.25"],
    ]


def test_rows_are_the_budget_and_what_was_verified() -> None:
    """`auto` verifies fewer than it may: tables.md gives both figures, under the same names."""
    auto = WIDE.model_copy(update={"method": "auto+lookup", "verified_rows": 4, "policies": {"off": 2}})
    made = result(PLAIN, auto)
    headings = [str(column.header) for column in summary(made).columns]
    printed = dict(zip(headings, rows_of(summary(made))[-1], strict=True))
    first, *_, last = detail_table(made, 0.0, 1).splitlines()
    written = dict(zip(*([part.strip() for part in line.split("|")] for line in (first, last)), strict=True))
    assert (printed["row budget"], printed["rows/step"]) == ("64", "2")
    assert float(written["row budget"]) == 64
    assert float(written["rows/step"]) == 2


def test_differences_are_counted_and_a_gpu_is_not_called_a_cpu() -> None:
    wrong = WIDE.model_copy(update={"differences": [Difference(request=0, token=1, gap=0.0, excused=True)]})
    said = list(remarks(result(PLAIN, wrong)))
    assert said[-1] == "1 answers compared with plain decoding's: 1 differ."
    assert "A CPU pays" in " ".join(said)
    on_gpu = result(PLAIN, wrong, provenance=PROVENANCE.model_copy(update={"device": "cuda"}))
    assert "CPU" not in " ".join(remarks(on_gpu))
