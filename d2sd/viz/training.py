"""Training curves: loss and tokens per step, one column per drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from d2sd.policies import DrafterName
from d2sd.viz import plot_style as style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from d2sd.runtime.evaluation import Evaluation

#: Maximum number of points of a loss curve: more are averaged, since single steps are noisy.
_POINTS = 200


@dataclass(frozen=True, slots=True)
class Curve:
    """The training log of one drafter."""

    drafter: DrafterName
    steps: list[tuple[int, dict[str, float]]]  # step, and its loss and terms by name
    evaluations: list[tuple[int, list[Evaluation]]]  # step, and one of each method


def plot_training(curves: Sequence[Curve], path: Path) -> None:
    """Draw the curves that have steps; writes nothing if none has."""
    begun = [curve for curve in curves if curve.steps]
    if not begun:
        return
    figure, axes = style.panels(2, len(begun), 2.9)
    for curve, (loss, tau) in zip(begun, zip(*axes, strict=True), strict=True):
        _loss(loss, curve)
        _tau(tau, curve)
        for panel in (loss, tau):  # one evaluation has no range of its own
            panel.set_xlim(0, 1.03 * curve.steps[-1][0])
        tau.sharey(axes[1][0])
    axes[0][0].set_ylabel("loss")
    axes[1][0].set_ylabel("tokens a step (τ)")
    style.finish(figure, "Training on the target's responses, evaluated on held-out prompts at T = 0", path)


def averaged(steps: Sequence[tuple[int, float]], points: int = _POINTS) -> list[tuple[float, float]]:
    """Means over groups of consecutive steps, of the smallest size that gives at most `points` means."""
    size = -(-len(steps) // points)
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _loss(panel: Axes, curve: Curve) -> None:
    names = list(dict.fromkeys(name for _, terms in curve.steps for name in terms))
    for name in names:
        points = averaged([(step, terms[name]) for step, terms in curve.steps if name in terms])
        panel.plot(*zip(*points, strict=True), linewidth=1.8 if name == "loss" else 1, label=None)
        panel.lines[-1].set_color("#333333" if name == "loss" else f"C{names.index(name)}")
    panel.legend(panel.lines, names, fontsize=8)
    panel.set_xlabel("step")
    panel.set_title(f"{curve.drafter} drafter", loc="left", fontsize=11)


def _tau(panel: Axes, curve: Curve) -> None:
    by_method: dict[str, list[tuple[int, Evaluation]]] = {}
    for step, scores in curve.evaluations:
        for score in scores:
            by_method.setdefault(score.method, []).append((step, score))
    for points in by_method.values():
        panel.plot([step for step, _ in points], [score.tau for _, score in points], **style.curve(points[0][1]))
    panel.set_xlabel("step")
    panel.set_title("tokens a step", loc="left", fontsize=11)
