"""The plots of a result, one PNG each: τ by row budget, τ by set, speedup. A plot without data is not written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from d2sd.bench import metrics, views
from d2sd.bench.bootstrap import Interval, tau_interval
from d2sd.bench.result import Cell, Result
from d2sd.viz import plot_style as style
from d2sd.viz.plot_style import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Of the place of a set, in which the points of all methods stand side by side.
_WIDTH = 0.7


def plot_tau_by_rows(result: Result, path: Path) -> None:
    """Mean of sets by row budget, at the lowest concurrency (which does not affect it), one panel per temperature.

    Not written if no method has several budgets.
    """
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
        _doubling(panel, ticks, "row budget (most tree nodes that the target verifies a step)")
        panel.set_title(f"T = {temperature:g}", loc="left", fontsize=11)
    axes[0][0].set_ylabel("tokens a step (τ), mean of sets")
    style.finish(figure, "Tokens per step by row budget (95 % intervals)", path)


def _errors(means: list[tuple[float, Interval | None]]) -> list[list[float]]:
    """Lengths of the error bars below and above; 0 without an interval."""
    below = [value - interval.low if interval else 0.0 for value, interval in means]
    above = [interval.high - value if interval else 0.0 for value, interval in means]
    # Rounding may put an interval's end past the value; matplotlib rejects negative lengths.
    return [[max(0.0, length) for length in side] for side in (below, above)]


def _doubling(panel: Axes, ticks: Sequence[int], label: str) -> None:
    """An x axis of powers of two."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.minorticks_off()
    panel.set_xlabel(label)


def plot_tau_by_set(result: Result, path: Path) -> None:
    """One point a method and set, each method at its largest row budget, at the lowest temperature and concurrency;
    the sets are sorted by what the best method makes of them.

    Not written for a single set, or for plain decoding alone.
    """
    temperature = min(views.temperatures(result))
    concurrency = views.concurrencies(result, temperature)[0]
    found = {
        line: {name: metrics.mean_tau([cell]) for name, cell in cells.items()}
        for line in views.widest(result, temperature, concurrency)
        if line.method != views.PLAIN
        and len(cells := views.cells_of(result, line, temperature, concurrency)) == len(views.sets(result))
    }
    if len(views.sets(result)) < 2 or not found:
        return
    names = sorted(views.sets(result), key=lambda name: -max(taus[name] for taus in found.values()))
    figure, ((panel,),) = style.panels(1, 1, 4.6)
    for at, (line, taus) in enumerate(found.items()):
        places = [place + _WIDTH * ((at + 0.5) / len(found) - 0.5) for place in range(len(names))]
        panel.plot(places, [taus[name] for name in names], **style.points(line))
    for border in range(1, len(names)):
        panel.axvline(border - 0.5, color="#DDDDDD", linewidth=0.8)
    panel.set_xticks(range(len(names)), names, rotation=20)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("tokens a step (τ)")
    title = f"Tokens per step by kind of prompt, T = {temperature:g} (each method at its largest row budget)"
    style.finish(figure, title, path)


def plot_speedup(result: Result, path: Path) -> None:
    """Speedup over plain decoding by requests in flight, all sets together, one panel per temperature; every method at
    its fastest row budget. A single concurrency is drawn as bars, since points would overlap.
    """
    gains = {t: speedups for t in views.temperatures(result) if (speedups := _speedups(result, t))}
    if not gains:
        return
    figure, axes = style.panels(1, len(gains), 4.6, sharey=True)
    for panel, (temperature, speedups) in zip(axes[0], gains.items(), strict=True):
        panel.axhline(1.0, color=style.colour(views.PLAIN), linestyle="--", linewidth=1.5, label="plain decoding")
        counts = views.concurrencies(result, temperature)
        (_draw_curves if len(counts) > 1 else _draw_bars)(panel, speedups, counts)
        panel.set_title(f"T = {temperature:g}", loc="left", fontsize=11)
        panel.set_ylim(bottom=0)
    axes[0][0].set_ylabel("speedup (tokens/s over plain decoding)")
    style.finish(figure, "Where speculation pays: above the line (each method at its fastest row budget)", path)


def _draw_curves(panel: Axes, gains: dict[str, dict[int, float]], counts: list[int]) -> None:
    for method, points in gains.items():
        panel.plot(list(points), list(points.values()), **style.curve(Line(method, 1)))
    _doubling(panel, counts, "requests in flight")


def _draw_bars(panel: Axes, gains: dict[str, dict[int, float]], counts: list[int]) -> None:
    (count,) = counts
    panel.bar(
        list(gains), [points[count] for points in gains.values()], color=[style.colour(method) for method in gains]
    )
    panel.tick_params(axis="x", rotation=30)
    panel.set_xlabel(f"method, {count} in flight")


def _speedups(result: Result, temperature: float) -> dict[str, dict[int, float]]:
    """Method -> concurrency -> best speedup over row budgets."""
    speedups: dict[str, dict[int, float]] = {}
    for concurrency in views.concurrencies(result, temperature):
        for line in views.lines(result, temperature, concurrency):
            cell, plain = views.pooled(result, line, temperature, concurrency)
            gained = metrics.speedup(cell, plain)
            if line.method != views.PLAIN and gained is not None:
                points = speedups.setdefault(line.method, {})
                points[concurrency] = max(gained, points.get(concurrency, 0.0))
    return speedups


PLOTS: dict[str, Callable[[Result, Path], None]] = {
    "tau-by-rows.png": plot_tau_by_rows,
    "tau-by-set.png": plot_tau_by_set,
    "speedup.png": plot_speedup,
}


def write_plots(result: Result, folder: Path) -> list[Path]:
    """Write all plots that have data into an existing folder, and remove those of an earlier result."""
    paths = [folder / name for name in PLOTS]
    for path, plot in zip(paths, PLOTS.values(), strict=True):
        path.unlink(missing_ok=True)
        plot(result, path)
    return [path for path in paths if path.exists()]
