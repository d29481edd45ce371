"""The plots: which are written, and that they draw the figures of the tables."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D

from d2sd.bench import metrics, views
from d2sd.bench.bootstrap import tau_interval
from d2sd.bench.plots import PLOTS, plot_speedup, plot_tau_by_rows, plot_tau_by_set, write_plots
from d2sd.bench.result import Result
from d2sd.viz import plot_style as style
from d2sd.viz.plot_style import Line
from tests.d2sd.bench.helpers import cell, result


@pytest.fixture(scope="module")
def whole() -> Result:
    """Methods by rows, sets, temperatures and concurrencies, as a long run would give them."""
    rng, cells = random.Random(0), []
    skill = {"off": 0.0, "lookup": 0.25, "chain": 0.5, "reanchor": 0.55, "d2sd": 0.62, "ddtree": 0.6, "hybrid": 0.66}
    axes = (1, 4, 16), (0.0, 1.0), ("gsm8k", "humaneval", "mt_bench"), skill.items()
    for concurrency, temperature, name, (method, share) in product(*axes):
        for rows in (1,) if method == "off" else (8,) if method in ("lookup", "chain") else (8, 16, 64):
            chance = share * (1 - 0.2 * temperature) * (1 + rows / 1000)
            draws = [[next((n for n in range(1, 8) if rng.random() >= chance), 8) for _ in range(30)] for _ in range(4)]
            changed: dict[str, Any] = {"set": name, "temperature": temperature, "concurrency": concurrency}
            seconds = 120 * (0.02 + 0.0005 * rows * concurrency) / concurrency
            cells.append(cell(method, *draws, rows=rows, wall_seconds=seconds, **changed))
    return result(*cells)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures as they are finished, before they are pixels."""
    kept: list[Figure] = []
    monkeypatch.setattr(style, "finish", lambda figure, title, path: kept.append(figure))
    return kept


Points = tuple[list[float], list[float]]


def points(line: Line2D) -> Points:
    x, y = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
    return x.tolist(), y.tolist()


def curves(axes: Axes) -> dict[str, Points]:
    """Label -> points of every curve, with error bars or without, that has a label."""
    lines = {str(line.get_label()): line for line in axes.lines if not str(line.get_label()).startswith("_")}
    lines |= {str(c.get_label()): c.lines[0] for c in axes.containers if isinstance(c, ErrorbarContainer)}
    return {label: points(line) for label, line in lines.items()}


def bars(axes: Axes) -> dict[str, BarContainer]:
    return {str(c.get_label()): c for c in axes.containers if isinstance(c, BarContainer)}


@pytest.mark.slow
def test_all_plots_are_pngs_one_can_read(whole: Result, tmp_path: Path) -> None:
    paths = write_plots(whole, tmp_path)
    assert [path.name for path in paths] == list(PLOTS)
    assert len(paths) == 3
    for path in paths:
        pixels = imread(path)
        assert pixels.shape[1] == 1200
        assert 500 < pixels.shape[0] < 2400
        assert pixels.std() > 0.05, "an empty figure"


def test_plots_without_data_are_not_written_and_old_ones_go(tmp_path: Path) -> None:
    (tmp_path / "speedup.png").write_bytes(b"of an earlier result")
    rows = [cell("d2sd", [2, 1], [1], rows=rows) for rows in (8, 16)]
    assert [p.name for p in write_plots(result(*rows), tmp_path)] == ["tau-by-rows.png"]
    assert [p.name for p in tmp_path.iterdir()] == ["tau-by-rows.png"]
    assert write_plots(result(cell("chain", [2, 1]), rows[1]), tmp_path) == [], "of one budget each: nothing rises"
    assert write_plots(result(cell("off", [1, 1])), tmp_path) == []


def test_tau_by_rows(whole: Result, tmp_path: Path, figures: list[Figure]) -> None:
    plot_tau_by_rows(whole, tmp_path)
    drawn = curves(figures[0].axes[0])
    assert list(drawn) == ["lookup", "chain", "reanchor", "d2sd", "ddtree", "hybrid"]
    means = [metrics.mean_tau(list(views.cells_of(whole, Line("d2sd", r), 0.0, 1).values())) for r in (8, 16, 64)]
    assert drawn["d2sd"][0] == [8, 16, 64]
    assert drawn["d2sd"][1] == pytest.approx(means)
    assert drawn["chain"][0] == [8]
    bars_of = {str(c.get_label()): c for c in figures[0].axes[0].containers if isinstance(c, ErrorbarContainer)}
    (whiskers,) = bars_of["d2sd"].lines[2]
    cells = list(views.cells_of(whole, Line("d2sd", 64), 0.0, 1).values())
    assert [y for _, y in whiskers.get_segments()[-1]] == pytest.approx(tau_interval(cells))


def test_tau_of_a_missing_set_is_missing(tmp_path: Path, figures: list[Figure]) -> None:
    plot_tau_by_rows(
        result(
            *(cell("ddtree", [1], set=name, rows=rows) for name in ("gsm8k", "mbpp") for rows in (8, 16)),
            *(cell("d2sd", [2], set="mbpp", rows=rows) for rows in (8, 16)),
        ),
        tmp_path,
    )
    assert list(curves(figures[0].axes[0])) == ["ddtree"], "no mean of other sets"


def test_tau_by_set_at_the_most_rows(whole: Result, tmp_path: Path, figures: list[Figure]) -> None:
    plot_tau_by_set(whole, tmp_path)
    (axes,) = figures[0].axes
    drawn = curves(axes)
    assert [label.split(", ")[0] for label in drawn] == ["lookup", "chain", "reanchor", "d2sd", "ddtree", "hybrid"]
    assert list(drawn)[-1] == "hybrid, 64 rows"
    names = [tick.get_text() for tick in axes.get_xticklabels()]
    cells = views.cells_of(whole, Line("hybrid", 64), 0.0, 1)
    assert sorted(names) == sorted(views.sets(whole))
    assert drawn["hybrid, 64 rows"][1] == pytest.approx([metrics.mean_tau([cells[name]]) for name in names])
    best = [max(taus[place] for _, taus in drawn.values()) for place in range(len(names))]
    assert best == sorted(best, reverse=True)


def test_no_line_joins_kinds_of_prompts(whole: Result, tmp_path: Path, figures: list[Figure]) -> None:
    """Kinds have no order. Points of a set are side by side around its name; those of a method with copies are full."""
    copying = [one.model_copy(update={"method": "hybrid+lookup"}) for one in whole.cells if one.method == "hybrid"]
    plot_tau_by_set(result(*whole.cells, *copying), tmp_path)
    (axes,) = figures[0].axes
    drawn = {str(line.get_label()): line for line in axes.lines if not str(line.get_label()).startswith("_")}
    assert {line.get_linestyle() for line in drawn.values()} == {"None"}
    at = [place for line in drawn.values() for place in points(line)[0]]
    assert len(set(at)) == len(at)
    assert all(abs(place - round(place)) < 0.5 for place in at)
    without, full = drawn["hybrid, 64 rows"], drawn["hybrid+lookup, 64 rows"]
    assert without.get_color() == full.get_color() == full.get_markerfacecolor() != without.get_markerfacecolor()


def test_one_set_has_no_plot_by_set(tmp_path: Path, figures: list[Figure]) -> None:
    plot_tau_by_set(result(cell("off", [1, 1]), cell("chain", [2, 1], [1])), tmp_path)
    plot_tau_by_set(result(cell("off", [1]), cell("off", [1], set="mbpp")), tmp_path)
    assert not figures


def test_speedup_takes_the_fastest_rows(tmp_path: Path, figures: list[Figure]) -> None:
    made = [cell("off", [1, 1], concurrency=c) for c in (1, 4)]
    runs = ((1, 8, 2.0), (1, 16, 1.0), (4, 8, 4.0), (4, 16, 8.0))
    made += [cell("d2sd", [4], concurrency=c, rows=rows, wall_seconds=seconds) for c, rows, seconds in runs]
    plot_speedup(result(*made), tmp_path)
    drawn = curves(figures[0].axes[0])
    assert drawn["d2sd"] == ([1.0, 4.0], [2.0, 0.5])
    assert drawn["plain decoding"][1] == [1.0, 1.0]
    plot_speedup(result(*made[2:]), tmp_path)
    assert len(figures) == 1, "without plain decoding there is no speedup"


def test_speedup_at_one_concurrency_is_bars(tmp_path: Path, figures: list[Figure]) -> None:
    plot_speedup(result(cell("off", [1, 1]), cell("d2sd", [3]), cell("chain", [1])), tmp_path)
    (axes,) = figures[0].axes
    (drawn,) = bars(axes).values()
    assert [patch.get_height() for patch in drawn.patches] == [0.5, 1.5]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["chain", "d2sd"]


def test_a_method_looks_the_same_in_all_plots_and_like_no_other() -> None:
    looks = {method: style.curve(Line(method, 8)) for method in [*views.METHODS, "own"]}
    assert len({look["color"] for look in looks.values()}) == len(looks)
    assert len({look["marker"] for look in looks.values()}) == len(looks)
    assert all(style.colour(method) == look["color"] for method, look in looks.items())


NAMES = ["uniform", "decay", "decay + focal", "decay + chain", "decay + focal + chain", "D-PACE", "D-PACE + focal"]


def test_no_title_is_cut(whole: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[float] = []

    def finish(figure: Figure, title: str, path: Path) -> None:
        widths.append(figure.suptitle(title, fontsize=13).get_window_extent().width / figure.bbox.width)

    monkeypatch.setattr(style, "finish", finish)
    for plot in PLOTS.values():
        plot(whole, tmp_path / "plot.png")
    assert len(widths) == len(PLOTS)
    assert max(widths) <= 1


def test_no_entry_of_a_legend_is_cut(tmp_path: Path) -> None:
    figure, ((panel,),) = style.panels(1, 1, 3.0)
    for name in NAMES:
        panel.plot([0, 1], label=style.name(Line(name, 8)))
    style.finish(figure, "title", tmp_path / "plot.png")
    (legend,) = figure.legends
    assert legend.get_window_extent().width <= figure.bbox.width


def test_reading_a_result_needs_neither_torch_nor_a_plotting_library() -> None:
    names = ("compare", "tables", "plots", "result")
    program = "import sys\n" + "".join(f"import d2sd.bench.{name}\n" for name in names)
    program += "print([n for n in ('torch', 'matplotlib') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
