"""Speedup by concurrency, over all sets together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from d2sd.bench import metrics, views
from d2sd.bench.result import Result
from d2sd.viz import plot_style as style
from d2sd.viz.plot_style import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_speedup(result: Result, path: Path) -> None:
    """Speedup over plain decoding by requests in flight, one panel per temperature; every method at its fastest
    row budget. A single concurrency is drawn as bars, since points would overlap.
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
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, [str(count) for count in counts])
    panel.minorticks_off()
    panel.set_xlabel("requests in flight")


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
