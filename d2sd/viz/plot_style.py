"""How all plots look: one colour and one marker a method, wherever it appears. Colours by Okabe and Ito, which the
colour-blind can tell apart; markers tell what colour does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2sd.bench.views import Line
from d2sd.extras import require_plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_METHODS = {
    "off": ("#7F7F7F", "_"),
    "lookup": ("#000000", "x"),
    "chain": ("#56B4E9", "o"),
    "samples": ("#CDB400", "v"),  # Okabe and Ito's yellow, darker: on white it is hardly seen
    "reanchor": ("#CC79A7", "^"),
    "d2sd": ("#D55E00", "s"),
    "ddtree": ("#009E73", "D"),
    "hybrid": ("#0072B2", "P"),
    "auto": ("#E69F00", "*"),
}
_OTHER = ("#8C510A", ".")
#: What is no policy, such as an objective, is told apart by its place.
_OTHERS = [_OTHER[0], *(colour for colour, _ in _METHODS.values())]
_DPI = 120
_INCHES = 10.0  # 1200 pixels wide
_WIDTH = 130  # characters of a legend's line, seven an entry for its handle


def colour(method: str, place: int = 0) -> str:
    """`place` counts the methods of a panel."""
    return _METHODS[method][0] if method in _METHODS else _OTHERS[place % len(_OTHERS)]


def curve(line: Line) -> dict[str, Any]:
    """Arguments of `plot` and `errorbar`."""
    chosen, marker = _METHODS.get(line.method, _OTHER)
    return {"color": chosen, "marker": marker, "markersize": 7, "linewidth": 1.8, "label": name(line)}


def name(line: Line) -> str:
    return line.method if line.rows == 1 else f"{line.method}, {line.rows} rows"


def panels(rows: int, columns: int, height: float, **sharing: Any) -> tuple[Figure, list[list[Axes]]]:
    """A grid of axes, `height` inches a row. No pyplot: nothing global changes and no display is asked for."""
    require_plots()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_INCHES, height * rows + 1.2), dpi=_DPI, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **sharing)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        one.set_axisbelow(True)
    return figure, [list(line) for line in axes]


def finish(figure: Figure, title: str, path: Path) -> None:
    """The title above, one legend of all panels below, and the file."""
    figure.suptitle(title, fontsize=13)
    entries = {label: handle for axes in figure.axes for handle, label in zip(*_legend(axes), strict=True)}
    if entries:
        columns = max(1, min(len(entries), 5, _WIDTH // (max(map(len, entries)) + 7)))
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(path, format="png")


def _legend(axes: Axes) -> tuple[Sequence[Any], Sequence[Any]]:
    handles, labels = axes.get_legend_handles_labels()
    return handles, labels
