"""How a training went: loss, tokens a step, acceptance by position and calibration, a column a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from d2sd.bench import metrics
from d2sd.bench.plots.drafts import reliability
from d2sd.bench.result import Cell, Drafter
from d2sd.bench.views import Line
from d2sd.viz import plot_style as style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Points of a loss curve at the most: more are averaged, for single steps say little.
_POINTS = 200


@dataclass(frozen=True, slots=True)
class Curve:
    """What was logged of one drafter."""

    drafter: Drafter
    steps: list[tuple[int, dict[str, float]]]  # step, and its loss and terms by name
    evaluations: list[tuple[int, list[Cell]]]  # step, and a cell a method


def plot_training(curves: Sequence[Curve], path: Path) -> None:
    """Draw those that have begun; nothing is written where none has."""
    begun = [curve for curve in curves if curve.steps]
    if not begun:
        return
    figure, axes = style.panels(5, len(begun), 2.9, height_ratios=[3, 3, 3, 3, 1.3])
    for curve, (loss, tau, acceptance, diagram, counts) in zip(begun, zip(*axes, strict=True), strict=True):
        _loss(loss, curve)
        _tau(tau, curve)
        cells = curve.evaluations[-1][1] if curve.evaluations else []
        _acceptance(acceptance, cells)
        reliability(diagram, counts, [(_line(cell), cell.calibration.get(curve.drafter, [])) for cell in cells])
        diagram.set_title(f"confidence of the {curve.drafter} drafter, uncorrected", loc="left", fontsize=11)
        counts.set_xlabel("predicted acceptance, given the path before")
        counts.set_xlim(diagram.get_xlim())
        tau.sharey(axes[1][0])
    for row, name in zip(axes, ("loss", "tokens a step (τ)", "share", "share accepted", "drafted tokens"), strict=True):
        row[0].set_ylabel(name)
    style.finish(figure, "Training on the target's answers, judged on held-out prompts at T = 0", path)


def averaged(steps: Sequence[tuple[int, float]], points: int = _POINTS) -> list[tuple[float, float]]:
    """Means over neighbouring steps, as few as give at most `points` of them."""
    size = -(-len(steps) // points)
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _loss(panel: Axes, curve: Curve) -> None:
    names = list(dict.fromkeys(name for _, said in curve.steps for name in said))
    for name in names:
        points = averaged([(step, said[name]) for step, said in curve.steps if name in said])
        panel.plot(*zip(*points, strict=True), linewidth=1.8 if name == "loss" else 1, label=None)
        panel.lines[-1].set_color("#333333" if name == "loss" else f"C{names.index(name)}")
    panel.legend(panel.lines, names, fontsize=8)
    panel.set_xlabel("step")
    panel.set_title(f"{curve.drafter} drafter", loc="left", fontsize=11)


def _tau(panel: Axes, curve: Curve) -> None:
    by_method: dict[str, list[tuple[int, Cell]]] = {}
    for step, cells in curve.evaluations:
        for cell in cells:
            by_method.setdefault(cell.method, []).append((step, cell))
    for points in by_method.values():
        panel.plot(
            [step for step, _ in points], [metrics.tau(cell) for _, cell in points], **style.curve(_line(points[0][1]))
        )
    panel.set_xlabel("step")
    panel.set_title("tokens a step", loc="left", fontsize=11)


def _acceptance(panel: Axes, cells: Sequence[Cell]) -> None:
    for cell in cells:
        look = style.curve(_line(cell)) | {"label": None}  # as above
        for shares, dashes in ((metrics.joint_acceptance(cell), "-"), (metrics.conditional_acceptance(cell), ":")):
            panel.plot(range(1, len(shares) + 1), shares, linestyle=dashes, **look)
    panel.set_xticks(range(1, max((len(metrics.joint_acceptance(cell)) for cell in cells), default=1) + 1))
    panel.set_ylim(0, 1.03)
    panel.set_xlabel("position k in the draft")
    panel.set_title("at least k accepted; dotted: k-th, given those before", loc="left", fontsize=11)


def _line(cell: Cell) -> Line:
    return Line(cell.method, cell.rows)
