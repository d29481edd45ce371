"""The table that `d2sd bench` ends with: tokens a step, what such a step costs, and the speed that follows."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from d2sd.bench import metrics, views
from d2sd.bench.markdown import number, rate
from d2sd.bench.result import Result


def summary(result: Result) -> Table:
    """Return every method at its largest budget, all sets, at the lowest temperature and concurrency."""
    temperature = views.temperatures(result)[0]
    concurrency = views.concurrencies(result, temperature)[0]
    table = Table("policy", title=f"all sets, T = {temperature:g}, {concurrency} in flight", title_justify="left")
    for heading in ("row budget", "rows/step", "τ by token", "cost, in plain steps", "tokens/s", "speedup"):
        table.add_column(heading, justify="right")
    for line in views.widest(result, temperature, concurrency):
        cell, plain = views.pooled(result, line, temperature, concurrency)
        cost, speedup = metrics.cycle_cost(cell, plain), metrics.speedup(cell, plain)
        rows = f"{metrics.rows_per_step(cell):.0f}"
        tau, speed = number(metrics.tau_by_token(cell)), rate(metrics.tokens_per_second(cell))
        table.add_row(line.method, str(line.rows), rows, tau, number(cost), speed, number(speedup))
    return table


def remarks(result: Result) -> Iterator[str]:
    """Yield the sentences below the table: when a policy pays, and whether the answers are plain decoding's."""
    yield "A policy pays where its τ by token exceeds the cost of its step."
    if result.provenance.device == "cpu":
        yield (
            "A CPU pays for each verified row: small trees are worth it, for one or two requests, and `auto` chooses "
            "among them. A GPU reads the weights once for all rows: at Qwen3-8B's size on an H100, two drafts and 64 "
            "rows took 1.50 plain steps (docs/gpu.md)."
        )
    compared = views.compared(result)
    different = sum(len(cell.differences) for cell in compared)
    yield f"{sum(len(cell.requests) for cell in compared)} answers compared with plain decoding's: {different} differ."
