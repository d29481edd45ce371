"""The common style of all plots: one colour and one marker per method.

The colours are Okabe and Ito's, which colour-blind readers can distinguish; markers separate similar colours.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from d2sd.extras import require_plots
from d2sd.policies import parse_method

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
