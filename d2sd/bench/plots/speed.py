"""Cost of a step by stage, and speedup by concurrency, over all sets together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2sd.bench import metrics, views
from d2sd.bench.result import Cell, Result
from d2sd.viz import plot_style as style
from d2sd.viz.plot_style import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: In the order of a step, in words; Paul Tol's light colours, so that no stage looks like a method.
STAGES = {
    "draft_first": ("first draft", "#77AADD"),
    "pick_boundaries": ("choice of branches", "#99DDFF"),
    "draft_second": ("second draft", "#44BB99"),
    "build_tree": ("tree", "#BBCC33"),
    "verify": ("target verifies", "#EE8866"),
    "accept": ("acceptance", "#EEDD88"),
    "commit": ("K/V written", "#FFAABB"),
    "retire": ("tokens read", "#AAAA00"),
    "other": ("other", "#DDDDDD"),
}
OTHER = "other"


def plot_cost(result: Result, path: Path) -> None:
    """Milliseconds per step by stage, without prefill: one bar per line, at the lowest temperature, one panel each for
    the lowest and the highest concurrency.

    The upper axis is in units of plain decoding steps, if plain decoding was measured.
    """
    temperature = views.temperatures(result)[0]
    concurrencies = views.concurrencies(result, temperature)
    concurrencies = sorted({concurrencies[0], concurrencies[-1]})
    lines = [views.lines(result, temperature, concurrency) for concurrency in concurrencies]
    if not any(metrics.step_seconds(cell) for cell in result.cells if cell.temperature == temperature):
        return
    heights = [len(found) for found in lines]
    figure, axes = style.panels(
        len(lines), 1, 1.1 + 0.32 * sum(heights) / len(heights), height_ratios=[h + 2 for h in heights]
    )
    for (panel,), concurrency, found in zip(axes, concurrencies, lines, strict=True):
        cells = [views.pooled(result, line, temperature, concurrency) for line in found]
        bars = list(range(len(found)))
        left = [0.0] * len(found)
        stages = [_milliseconds(cell) for cell, _ in cells]
        for stage, (words, colour) in STAGES.items():
            spent = [times[stage] for times in stages]
            if not any(spent):
                continue
            panel.barh(bars, spent, left=left, color=colour, label=words, edgecolor="white", linewidth=0.5)
            left = [a + b for a, b in zip(left, spent, strict=True)]
        panel.set_yticks(bars, [style.name(line) for line in found])
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        panel.grid(axis="x", color="#DDDDDD", linewidth=0.8)
        panel.set_xlabel("milliseconds a step")
        panel.set_title(f"{concurrency} in flight", loc="left", fontsize=11)
        plain = next((plain for _, plain in cells if plain), None)
        if plain and (unit := 1e3 * metrics.step_seconds(plain)):
            panel.secondary_xaxis("top", functions=_units(unit)).set_xlabel("plain steps")
    title = f"Where the time of a step goes (T = {temperature:g}): a bar of n plain steps must yield more than n tokens"
    style.finish(figure, title, path)


def _milliseconds(cell: Cell) -> dict[str, float]:
    """Milliseconds per step by stage; their sum is `metrics.step_seconds`."""
    found = dict.fromkeys(STAGES, 0.0)
    for stage, spent in cell.stage_seconds.items():
        if stage != "prefill":
            found[stage if stage in STAGES else OTHER] += 1e3 * spent / cell.steps
    return found


def _units(unit: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Conversion from milliseconds to plain steps and back, for numbers and arrays."""
    return lambda milliseconds: milliseconds / unit, lambda steps: steps * unit


def plot_speedup(result: Result, path: Path) -> None:
    """Speedup over plain decoding by requests in flight, one panel per temperature; every method at its fastest
    row budget. A single concurrency is drawn as bars, since points would overlap.
    """
    gains = {t: found for t in views.temperatures(result) if (found := _speedups(result, t))}
    if not gains:
        return
    figure, axes = style.panels(1, len(gains), 4.6, sharey=True)
    for panel, (temperature, found) in zip(axes[0], gains.items(), strict=True):
        panel.axhline(1.0, color=style.colour(views.PLAIN), linestyle="--", linewidth=1.5, label="plain decoding")
        counts = views.concurrencies(result, temperature)
        (_draw_curves if len(counts) > 1 else _draw_bars)(panel, found, counts)
        panel.set_title(f"T = {temperature:g}", loc="left", fontsize=11)
        panel.set_ylim(bottom=0)
    axes[0][0].set_ylabel("speedup (tokens/s over plain decoding)")
    style.finish(figure, "Where speculation pays: above the line (each method at its fastest row budget)", path)


def _draw_curves(panel: Axes, found: dict[str, dict[int, float]], counts: list[int]) -> None:
    for method, points in found.items():
        panel.plot(list(points), list(points.values()), **style.curve(Line(method, 1)))
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, [str(count) for count in counts])
    panel.minorticks_off()
    panel.set_xlabel("requests in flight")


def _draw_bars(panel: Axes, found: dict[str, dict[int, float]], counts: list[int]) -> None:
    (count,) = counts
    panel.bar(
        list(found), [points[count] for points in found.values()], color=[style.colour(method) for method in found]
    )
    panel.tick_params(axis="x", rotation=30)
    panel.set_xlabel(f"method, {count} in flight")


def _speedups(result: Result, temperature: float) -> dict[str, dict[int, float]]:
    """Method -> concurrency -> best speedup over row budgets."""
    found: dict[str, dict[int, float]] = {}
    for concurrency in views.concurrencies(result, temperature):
        for line in views.lines(result, temperature, concurrency):
            cell, plain = views.pooled(result, line, temperature, concurrency)
            gained = metrics.speedup(cell, plain)
            if line.method != views.PLAIN and gained is not None:
                points = found.setdefault(line.method, {})
                points[concurrency] = max(gained, points.get(concurrency, 0.0))
    return found
