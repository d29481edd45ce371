"""Drafter quality: acceptance by position, and confidence calibration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from d2sd.bench import metrics, views
from d2sd.bench.result import Cell, Result
from d2sd.policies import DRAFTER_NAMES, DrafterName
from d2sd.viz import plot_style as style
from d2sd.viz.plot_style import Line


def plot_acceptance(result: Result, path: Path) -> None:
    """Joint and conditional acceptance, one line per method at its largest budget, a row of panels per temperature.

    Conditional shares of fewer than LEAST_SAMPLES request-steps are left out.
    """
    shown = {t: [(line, cell) for line, cell in cells if metrics.joint_acceptance(cell)] for t, cells in _all(result)}
    shown = {t: cells for t, cells in shown.items() if cells}
    if not shown:
        return
    kinds: dict[str, Callable[[Cell], list[float]]] = {
        "joint: at least k accepted": metrics.joint_acceptance,
        "conditional: k-th accepted, given those before": _conditional,
    }
    drawn = [cell for cells in shown.values() for _, cell in cells]
    kinds = {title: shares for title, shares in kinds.items() if any(map(shares, drawn))}
    figure, axes = style.panels(len(shown), len(kinds), 3.6, sharey=True)
    for row, (temperature, cells) in zip(axes, shown.items(), strict=True):
        for panel, (title, shares) in zip(row, kinds.items(), strict=True):
            for line, cell in cells:
                values = shares(cell)
                panel.plot(range(1, len(values) + 1), values, **style.curve(line))
            deepest = max(len(metrics.joint_acceptance(cell)) for _, cell in cells)
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
    shown = {t: [(line, cell) for line, cell in cells if cell.calibration] for t, cells in _all(result)}
    shown = {t: cells for t, cells in shown.items() if cells}
    if not shown:
        return
    drafters = [d for d in DRAFTER_NAMES if any(sum(_tokens(cell, d)) for cells in shown.values() for _, cell in cells)]
    ratios = [3, 1.3] * len(shown)
    figure, axes = style.panels(2 * len(shown), len(drafters), 2.9, sharex=True, height_ratios=ratios)
    for (temperature, cells), above, below in zip(shown.items(), axes[::2], axes[1::2], strict=True):
        for drafter, diagram, counts in zip(drafters, above, below, strict=True):
            bins = [(line, cell.calibration.get(drafter, [])) for line, cell in cells]
            style.reliability(diagram, counts, [(line, one, metrics.calibration_error(one)) for line, one in bins])
            diagram.set_title(f"T = {temperature:g}, {drafter} drafter", loc="left", fontsize=11)
        above[0].set_ylabel("share accepted")
        below[0].set_ylabel("drafted tokens")
    for panel in axes[-1]:
        panel.set_xlabel("predicted acceptance, given the path before")
    title = "Calibration of drafter confidence: on the diagonal calibrated, below it overconfident"
    style.finish(figure, f"{title}\n(pale points: fewer than {style.LEAST_SAMPLES} tokens)", path)


def _conditional(cell: Cell) -> list[float]:
    """The leading conditional shares that have enough samples: each is of the request-steps that came that far."""
    steps, joint = metrics.request_steps(cell), metrics.joint_acceptance(cell)
    came = [steps, *(share * steps for share in joint)]
    return [
        share
        for share, count in zip(metrics.conditional_acceptance(cell), came, strict=False)
        if round(count) >= style.LEAST_SAMPLES
    ]


def _tokens(cell: Cell, drafter: DrafterName) -> list[int]:
    """Drafted tokens of each bin."""
    return [count for count, _, _ in cell.calibration.get(drafter, [])]


def _all(result: Result) -> list[tuple[float, list[tuple[Line, Cell]]]]:
    """By temperature at its lowest concurrency: every method at its largest row budget, all sets in one cell."""
    found = []
    for temperature in views.temperatures(result):
        at = (temperature, views.concurrencies(result, temperature)[0])
        found.append((temperature, [(line, views.pooled(result, line, *at)[0]) for line in views.widest(result, *at)]))
    return found
