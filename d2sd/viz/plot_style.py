"""The common style of all plots: one colour and one marker per method.

The colours are Okabe and Ito's, which colour-blind readers can distinguish; markers separate similar colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from d2sd.extras import require_plots
from d2sd.policies import DrafterName, parse_method
from d2sd.viz import plot_style as style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from d2sd.runtime.evaluation import Evaluation


#: Colour and marker of every method, from no drafter to both: the order of tables and legends.
METHODS = {
    "off": ("#7F7F7F", "_"),
    "lookup": ("#000000", "x"),
    "flex_parallel": ("#AA4499", "h"),
    "chain": ("#56B4E9", "o"),
    "reanchor": ("#CC79A7", "^"),
    "d2sd": ("#D55E00", "s"),
    "ddtree": ("#009E73", "D"),
    "hybrid": ("#0072B2", "P"),
    "auto": ("#E69F00", "*"),
}
_OTHER = ("#8C510A", ".")
_DPI = 120
_INCHES = 10.0  # 1200 pixels wide
_WIDTH = 130  # characters of a legend line, seven of them per entry for its handle


class Line(NamedTuple):
    """A method at a node budget: a line of a table, a bar or a curve of a plot."""

    method: str
    rows: int


def colour(method: str) -> str:
    return METHODS.get(parse_method(method)[0], _OTHER)[0]


def curve(line: Line | Evaluation) -> dict[str, Any]:
    """Arguments of `plot` and `errorbar`: the markers of a method with copies are full."""
    policy, lookup = parse_method(line.method)
    chosen, marker = METHODS.get(policy, _OTHER)
    style = {"color": chosen, "marker": marker, "markersize": 7, "linewidth": 1.8, "label": name(line)}
    return {**style, "linestyle": "--" if lookup else "-", "markerfacecolor": chosen if lookup else "white"}


def points(line: Line) -> dict[str, Any]:
    """Arguments of `plot` for points that no line joins."""
    return {**curve(line), "linestyle": "none"}


def name(line: Line | Evaluation) -> str:
    return line.method if line.rows == 1 else f"{line.method}, {line.rows} rows"


def panels(rows: int, columns: int, height: float, **sharing: Any) -> tuple[Figure, list[list[Axes]]]:
    """A grid of axes, `height` inches per row. Without pyplot, so no global state changes and no display is needed."""
    require_plots()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_INCHES, height * rows + 1.2), dpi=_DPI, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **sharing)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        panel.set_axisbelow(True)
    return figure, [list(line) for line in axes]


def finish(figure: Figure, title: str, path: Path) -> None:
    """Add the title and one legend for all panels, and write the PNG file."""
    figure.suptitle(title, fontsize=13)
    entries = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if entries:
        columns = max(1, min(len(entries), 5, _WIDTH // (max(map(len, entries)) + 7)))
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(path, format="png")


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
