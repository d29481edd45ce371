"""Drafter quality: acceptance by position, and confidence calibration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from d2sd.bench import metrics, views
from d2sd.bench.result import Cell, Result
from d2sd.policies import DrafterName
from d2sd.viz import plot_style as style
from d2sd.viz.plot_style import Line

DRAFTERS: tuple[DrafterName, ...] = ("first", "second")


def plot_acceptance(result: Result, path: Path) -> None:
    """Joint and conditional acceptance, one line per method at its largest budget, a row of panels per temperature."""
    shown = {t: [(line, cell) for line, cell in cells if metrics.joint_acceptance(cell)] for t, cells in _all(result)}
    shown = {t: cells for t, cells in shown.items() if cells}
    if not shown:
        return
    figure, axes = style.panels(len(shown), 2, 3.6, sharey=True)
    kinds: dict[str, Callable[[Cell], list[float]]] = {
        "joint: at least k accepted": metrics.joint_acceptance,
        "conditional: k-th accepted, given those before": metrics.conditional_acceptance,
    }
    for row, (temperature, cells) in zip(axes, shown.items(), strict=True):
        for panel, (title, shares) in zip(row, kinds.items(), strict=True):
            for line, cell in cells:
                values = shares(cell)
                panel.plot(range(1, len(values) + 1), values, **style.curve(line))
            panel.set_xticks(range(1, max(len(shares(cell)) for _, cell in cells) + 1))
            panel.set_xlabel("position k in the draft")
            panel.set_title(f"T = {temperature:g}, {title}", loc="left", fontsize=11)
        row[0].set_ylim(0, 1.03)
        row[0].set_ylabel("share")
    style.finish(figure, "Acceptance by draft position: the flatter a line, the longer a block is worth drafting", path)


def plot_calibration(result: Result, path: Path) -> None:
    """Reliability diagrams of both drafters above the token counts of the bins, two rows of panels per temperature."""
    shown = {t: [(line, cell) for line, cell in cells if cell.calibration] for t, cells in _all(result)}
    shown = {t: cells for t, cells in shown.items() if cells}
    if not shown:
        return
    figure, axes = style.panels(2 * len(shown), 2, 2.9, sharex=True, height_ratios=[3, 1.3] * len(shown))
    for (temperature, cells), above, below in zip(shown.items(), axes[::2], axes[1::2], strict=True):
        for drafter, diagram, counts in zip(DRAFTERS, above, below, strict=True):
            bins = [(line, cell.calibration.get(drafter, [])) for line, cell in cells]
            style.reliability(diagram, counts, [(line, one, metrics.calibration_error(one)) for line, one in bins])
            diagram.set_title(f"T = {temperature:g}, {drafter} drafter", loc="left", fontsize=11)
        above[0].set_ylabel("share accepted")
        below[0].set_ylabel("drafted tokens")
    for panel in axes[-1]:
        panel.set_xlabel("predicted acceptance, given the path before")
    style.finish(figure, "Calibration of drafter confidence: on the diagonal calibrated, below it overconfident", path)


def _all(result: Result) -> list[tuple[float, list[tuple[Line, Cell]]]]:
    """By temperature at its lowest concurrency: every method at its largest row budget, all sets in one cell."""
    found = []
    for temperature in views.temperatures(result):
        at = (temperature, views.concurrencies(result, temperature)[0])
        found.append((temperature, [(line, views.pooled(result, line, *at)[0]) for line in views.widest(result, *at)]))
    return found
