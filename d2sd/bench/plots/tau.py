"""Tokens per step by row budget, at the lowest concurrency (which does not affect it)."""

from __future__ import annotations

from pathlib import Path

from d2sd.bench import metrics, views
from d2sd.bench.bootstrap import Interval, tau_interval
from d2sd.bench.result import Cell, Result
from d2sd.viz import plot_style as style
from d2sd.viz.plot_style import Line


def plot_tau_by_rows(result: Result, path: Path) -> None:
    """Mean of sets by row budget, one panel per temperature. Not written if no method has several budgets."""
    budgets: dict[tuple[float, str], dict[int, list[Cell]]] = {}
    for temperature in views.temperatures(result):
        concurrency = views.concurrencies(result, temperature)[0]
        for line in views.lines(result, temperature, concurrency):
            cells = list(views.cells_of(result, line, temperature, concurrency).values())
            if line.method != views.PLAIN and len(cells) == len(views.sets(result)):
                budgets.setdefault((temperature, line.method), {})[line.rows] = cells
    temperatures = sorted({t for t, _ in budgets})
    if all(len(by_rows) < 2 for by_rows in budgets.values()):
        return
    figure, axes = style.panels(1, len(temperatures), 4.6, sharey=True)
    ticks = sorted({rows for by_rows in budgets.values() for rows in by_rows})
    for panel, temperature in zip(axes[0], temperatures, strict=True):
        for (of, method), by_rows in budgets.items():
            if of == temperature:
                means = [(metrics.mean_tau(cells), tau_interval(cells)) for cells in by_rows.values()]
                look = style.curve(Line(method, 1))
                panel.errorbar(list(by_rows), [value for value, _ in means], yerr=_errors(means), capsize=3, **look)
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [str(rows) for rows in ticks])
        panel.minorticks_off()
        panel.set_xlabel("row budget (most tree nodes that the target verifies a step)")
        panel.set_title(f"T = {temperature:g}", loc="left", fontsize=11)
    axes[0][0].set_ylabel("tokens a step (τ), mean of sets")
    style.finish(figure, "Tokens per step by row budget (95 % intervals)", path)


def _errors(means: list[tuple[float, Interval | None]]) -> list[list[float]]:
    """Lengths of the error bars below and above; 0 without an interval."""
    below = [value - interval.low if interval else 0.0 for value, interval in means]
    above = [interval.high - value if interval else 0.0 for value, interval in means]
    # Rounding may put an interval's end past the value; matplotlib rejects negative lengths.
    return [[max(0.0, length) for length in side] for side in (below, above)]
