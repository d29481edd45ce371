"""The tables, figure by figure, on a result of a few cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from d2sd.bench import markdown
from d2sd.bench.result import Difference, Result
from d2sd.bench.tables import (
    DEFINITIONS,
    chosen_table,
    definitions,
    detail_table,
    knowledge_table,
    lossless,
    tables,
    tau_table,
)
from tests.d2sd.bench.helpers import bins, cell, result

PLAIN = {"verified_rows": 4, "nodes": 4, "steps": 4, "stage_seconds": {"verify": 0.4, "prefill": 9.0}}
TREE = {
    "verified_rows": 32,
    "nodes": 20,
    "merged": 6,
    "rescued": 1,
    "steps": 4,
    "stage_seconds": {"verify": 1.0, "draft_first": 0.2},
    "boundary_rank": {"0": 1, "1": 2, "none": 1},
    "calibration": {"first": bins(b9=(10, 9.0, 8))},
}


@pytest.fixture
def made() -> Result:
    return result(
        cell("off", [1, 1], [1, 1], set="gsm8k", wall_seconds=2.0, **PLAIN),
        cell("off", [1, 1], [1, 1], set="mbpp", wall_seconds=2.0, **PLAIN),
        cell("chain", [2, 2], [1, 1], set="gsm8k"),
        cell("d2sd", [4, 2], [2, 2], set="gsm8k", **TREE),
        cell("d2sd", [1, 2], [1, 2], set="mbpp", **TREE),
        cell("off", [1, 1], [1, 1], set="gsm8k", concurrency=2, wall_seconds=1.0),
        cell("d2sd", [4, 2], [2, 2], set="gsm8k", concurrency=2, wall_seconds=5.0),
    )


def body(table: str) -> list[list[str]]:
    return [[part.strip() for part in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_what_was_not_measured_has_no_column_and_no_figure(made: Result) -> None:
    """Neither a set at another temperature, nor a gain over plain decoding, nor what no drafter knew."""
    warm = result(*made.cells, cell("off", [1], set="mt_bench", temperature=1.0))
    assert tau_table(warm, 0.0, 1) == tau_table(made, 0.0, 1)
    assert body(tau_table(warm, 1.0, 1)) == [["off", "1", "1.00", "1.00", "–"]]  # one prompt has no interval
    table = detail_table(result(*(c for c in made.cells if c.method != "off")), 0.0, 1)
    assert [line[-2:] for line in body(table)] == [["–", "–"], ["–", "–"]]
    assert knowledge_table(result(cell()), 0.0, 1) is None


def test_policies_of_auto_are_listed_by_concurrency() -> None:
    chain = cell("chain", [2], policies={"chain": 4})
    one = cell("auto", [1], policies={"off": 1, "hybrid of 16 rows": 3})
    four = cell("auto", [1], policies={"off": 4}, concurrency=4)
    table = chosen_table(result(chain, one, four), 0.0)
    assert table is not None
    assert body(table) == [["hybrid of 16 rows: 75 %, off: 25 %", "off: 100 %"]]
    assert chosen_table(result(chain), 0.0) is None


def test_losslessness_counts_all_but_the_reference_and_lists_what_no_tie_excuses(made: Result) -> None:
    assert lossless(made) == "10 responses compared with plain decoding: 0 differ, 0 beyond a tie."
    tie = Difference(request=0, token=3, gap=1e-6, excused=True)
    wrong = Difference(request=1, token=7, gap=0.25, excused=False)
    cells = [made.cells[3].model_copy(update={"differences": [tie, wrong]})]
    assert lossless(result(*cells)).splitlines() == [
        "2 responses compared with plain decoding: 2 differ, 1 beyond a tie.",
        "- d2sd, 8 rows, gsm8k, T = 0, 1 in flight: 1, token 7, gap 2.5e-01",
    ]


def test_every_column_is_defined_by_the_docstring_of_its_metric(made: Result) -> None:
    told = definitions()
    assert "- **τ**: Mean over responses of each response's tokens per step, bonus included" in told
    assert all(f"- **{name}**: {(of.__doc__ or '?').split()[0]}" in told for name, of in DEFINITIONS.items())
    columns = {name.strip() for name in detail_table(made, 0.0, 1).splitlines()[0].split("|")} - {
        "",
        "method",
        "row budget",
    }
    assert columns <= DEFINITIONS.keys()


def test_the_report(made: Result) -> None:
    """No method has a mean over fewer sets than the others, and none is bold that stands alone."""
    warm = result(*made.cells, cell("off", [1], temperature=0.7, concurrency=3))
    found = tables(warm).replace(definitions(), "(as docstrings have them)")
    assert f"{found}\n" == Path(__file__).with_name("report.md").read_text("utf-8")


def test_numbers_and_cells() -> None:
    """Bold is all that reads like the largest, and never a lonely value."""
    assert [markdown.rate(v) for v in (None, 3.14159, 99.96, 1234.5)] == ["–", "3.1", "100.0", "1234"]
    assert markdown.percent(0.125) == "12 %"
    assert markdown.table([("a|b", ["x"]), ("n", ["1"])]) == "| a\\|b | n |\n| --- | ---: |\n| x | 1 |"
    assert markdown.largest_bold([1.0, 2.001, None, 1.999]) == ["1.00", "**2.00**", "–", "**2.00**"]
    assert markdown.largest_bold([1.0, None]) == ["1.00", "–"]
    assert markdown.largest_bold([None]) == ["–"]
