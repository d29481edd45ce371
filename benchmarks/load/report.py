"""Tables of a serving result, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.load.result import Cell, Result
from d2sd.bench.markdown import line_table

_HEADERS = (
    "load",
    "server",
    "TTFT p50 / p90 / p99, ms",
    "ITL mean / p50 / p99, ms",
    "E2E p50 / p99, s",
    "tokens/s",
    "goodput, requests/s",
    "tokens a step",
    "prompt tokens computed",
    "CPU ms a token",
    "gain: TTFT",
    "tokens/s",
    "CPU",
)


def rows(result: Result) -> Iterator[list[str]]:
    """One row a cell, in the order of `_HEADERS`."""
    for cell in result.cells:
        f = cell.figures
        yield [
            f"{cell.key.workload}, {cell.key.load}",
            str(cell.key.variant),
            f"{f.ttft.p50:.0f} / {f.ttft.p90:.0f} / {f.ttft.p99:.0f}",
            f"{f.itl.mean:.1f} / {f.itl.p50:.1f} / {f.itl.p99:.1f}",
            f"{f.e2e.p50 / 1e3:.2f} / {f.e2e.p99 / 1e3:.2f}",
            f"{f.tokens_per_second:.1f}",
            f"{f.goodput:.2f} of {f.requests_per_second:.2f}",
            f"{f.accepted_length:.2f}",
            f"{f.computed_prompt_tokens:,} of {f.prompt_tokens:,}",
            "" if f.cpu_per_token is None else f"{f.cpu_per_token:.1f}",
            *(_gain(result, cell, name) for name in ("ttft.mean", "seconds_per_token", "cpu_per_token")),
        ]


def markdown(result: Result) -> str:
    """The table, what it means and where it was measured."""
    made, slo = result.provenance, result.slo
    lines = [
        "# Serving",
        "",
        f"{made.date}, {made.machine['processor']}, {made.machine['cores']} cores; `{made.command}`.",
        "",
        line_table(_HEADERS, rows(result)),
        "",
        "ITL is of tokens: k tokens that arrive together t after the chunk before them are k latencies of t / k. "
        f"Goodput: requests whose TTFT is at most {1e3 * slo.ttft:g} ms and mean ITL at most {1e3 * slo.itl:g} ms. "
        "Figures are of the run with the median time. Gain: medians over runs, in each against the run beside it of "
        "the same load without speculation, or, for `prefix` and `turns`, without the prefix cache; above 1 is better.",
        "",
    ]
    return "\n".join(lines)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown table of rows with the same keys."""
    headings = [name.replace("_", " ") for name in rows[0]]
    return line_table(headings, (list(map(_cell, row.values())) for row in rows)) + "\n"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return str(value)


def _gain(result: Result, cell: Cell, figure: str) -> str:
    gain = result.gain(cell, figure)
    return "" if gain is None else f"{gain:.2f}"
