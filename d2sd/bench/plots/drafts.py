"""Drafter quality: acceptance by position, and confidence calibration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from d2sd.bench import metrics, views
from d2sd.bench.result import Cell, Result
from d2sd.policies import DRAFTER_NAMES
from d2sd.viz import plot_style as style


def plot_acceptance(result: Result, path: Path) -> None:
    """Joint and conditional acceptance, one line per method at its largest budget, a row of panels per temperature.

    Conditional shares of fewer than LEAST_SAMPLES request-steps are left out.
    """
    shown = _cells(result, lambda cell: bool(cell.joint_acceptance))
    kinds: dict[str, Callable[[Cell], list[float]]] = {"joint: at least k accepted": lambda cell: cell.joint_acceptance}
    if any(_conditional(cell) for cells in shown.values() for cell in cells):
        kinds["conditional: k-th accepted, given those before"] = _conditional
    if not shown:
        return
    figure, axes = style.panels(len(shown), len(kinds), 3.6, sharey=True)
    for row, (temperature, cells) in zip(axes, shown.items(), strict=True):
        for panel, (title, shares) in zip(row, kinds.items(), strict=True):
            for cell in cells:
                values = shares(cell)
                panel.plot(range(1, len(values) + 1), values, **style.curve(cell))
            deepest = max(len(cell.joint_acceptance) for cell in cells)
            panel.set_xticks(range(1, deepest + 1))
            panel.set_xlim(0.7, deepest + 0.3)
            panel.set_xlabel("position k in the draft")
            panel.set_title(f"T = {temperature:g}, {title}", loc="left", fontsize=11)
        row[0].set_ylim(0, 1.03)
        row[0].set_ylabel("share")
    style.finish(figure, "Acceptance by draft position: the flatter a line, the longer a block is worth drafting", path)


def plot_calibration(result: Result, path: Path) -> None:
    """Reliability diagrams of the drafters that drafted, above the token counts of the bins, two rows of panels per
    temperature. Bins of few tokens are pale.
    """
    shown = _cells(result, lambda cell: bool(cell.calibration_errors))
    if not shown:
        return
    drafters = [d for d in DRAFTER_NAMES if any(d in c.calibration_errors for cells in shown.values() for c in cells)]
    ratios = [3, 1.3] * len(shown)
    figure, axes = style.panels(2 * len(shown), len(drafters), 2.9, sharex=True, height_ratios=ratios)
    for (temperature, cells), above, below in zip(shown.items(), axes[::2], axes[1::2], strict=True):
        for drafter, diagram, counts in zip(drafters, above, below, strict=True):
            style.reliability(diagram, counts, cells, drafter)
            diagram.set_title(f"T = {temperature:g}, {drafter} drafter", loc="left", fontsize=11)
        above[0].set_ylabel("share accepted")
        below[0].set_ylabel("drafted tokens")
    for panel in axes[-1]:
        panel.set_xlabel("predicted acceptance, given the path before")
    title = "Calibration of drafter confidence: on the diagonal calibrated, below it overconfident"
    style.finish(figure, f"{title}\n(pale points: fewer than {style.LEAST_SAMPLES} tokens)", path)


def _conditional(cell: Cell) -> list[float]:
    """The leading conditional shares that have enough samples: each is of the request-steps that came that far."""
    steps = metrics.request_steps(cell)
    came = [steps, *(share * steps for share in cell.joint_acceptance)]
    shares = zip(cell.conditional_acceptance, came, strict=False)
    return [share for share, count in shares if round(count) >= style.LEAST_SAMPLES]


def _cells(result: Result, has_data: Callable[[Cell], bool]) -> dict[float, list[Cell]]:
    """By temperature at its lowest concurrency: every method at its largest row budget, all sets in one cell."""
    found = {}
    for temperature in views.temperatures(result):
        at = (temperature, views.concurrencies(result, temperature)[0])
        pooled = (views.pooled(result, line, *at)[0] for line in views.widest(result, *at))
        found[temperature] = [cell for cell in pooled if has_data(cell)]
    return {temperature: cells for temperature, cells in found.items() if cells}
