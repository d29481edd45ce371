"""The plots: which are written, and that they draw the figures of the tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D

from d2sd.bench import metrics, views
from d2sd.bench.bootstrap import tau_interval
from d2sd.bench.plots import PLOTS, write_plots
from d2sd.bench.plots.drafts import plot_acceptance, plot_calibration
from d2sd.bench.plots.speed import plot_cost, plot_speedup
from d2sd.bench.plots.tau import plot_tau, plot_tau_by_rows
from d2sd.bench.result import Result
from d2sd.viz import plot_style as style
from d2sd.viz.plot_style import Line
from tests.d2sd.bench.helpers import bins, cell, result, sweep


@pytest.fixture(scope="module")
def whole() -> Result:
    return sweep(prompts=4)


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


def test_all_plots_are_pngs_one_can_read(whole: Result, tmp_path: Path) -> None:
    paths = write_plots(whole, tmp_path)
    assert [path.name for path in paths] == list(PLOTS)
    assert len(paths) == 6
    for path in paths:
        pixels = imread(path)
        assert pixels.shape[1] == 1200
        assert 500 < pixels.shape[0] < 2400
        assert pixels.std() > 0.05, "an empty figure"


def test_plots_without_data_are_not_written_and_old_ones_go(tmp_path: Path) -> None:
    (tmp_path / "speedup.png").write_bytes(b"of an earlier result")
    assert [p.name for p in write_plots(result(cell("chain", [2, 1], [1])), tmp_path)] == ["tau.png", "acceptance.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["acceptance.png", "tau.png"]
    assert [p.name for p in write_plots(result(cell("off", [1, 1])), tmp_path)] == ["tau.png"]


def test_tau_bars_are_the_table(whole: Result, tmp_path: Path, figures: list[Figure]) -> None:
    plot_tau(whole, tmp_path)
    (figure,) = figures
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["T = 0", "T = 1"]
    cells = list(views.cells_of(whole, Line("d2sd", 64), 1.0, 1).values())
    drawn = bars(figure.axes[1])
    assert list(drawn) == [style.name(line) for line in views.widest(whole, 1.0, 1)]
    heights = [patch.get_height() for patch in drawn["d2sd, 64 rows"].patches]
    assert heights == pytest.approx([*(one.tau for one in cells), metrics.mean_tau(cells)])
    errors = drawn["d2sd, 64 rows"].errorbar
    assert errors is not None
    (whiskers,) = errors.lines[2]
    assert [y for _, y in whiskers.get_segments()[-1]] == pytest.approx(tau_interval(cells))


def test_tau_bars_of_a_missing_set_are_missing(tmp_path: Path, figures: list[Figure]) -> None:
    plot_tau(result(cell("off", [1]), cell("off", [1], set="mbpp"), cell("chain", [2], set="mbpp")), tmp_path)
    (bar,) = bars(figures[0].axes[0])["chain, 8 rows"].patches
    assert bar.get_x() + bar.get_width() / 2 == pytest.approx(1.21)


def test_tau_by_rows(whole: Result, tmp_path: Path, figures: list[Figure]) -> None:
    plot_tau_by_rows(whole, tmp_path)
    drawn = curves(figures[0].axes[0])
    assert list(drawn) == ["lookup", "chain", "reanchor", "d2sd", "ddtree", "hybrid"]
    means = [metrics.mean_tau(list(views.cells_of(whole, Line("d2sd", r), 0.0, 1).values())) for r in (8, 16, 64)]
    assert drawn["d2sd"][0] == [8, 16, 64]
    assert drawn["d2sd"][1] == pytest.approx(means)
    assert drawn["chain"][0] == [8]


def test_acceptance_lines(tmp_path: Path, figures: list[Figure]) -> None:
    made = result(cell("off", [1]), cell("chain", [3, 1]), cell("d2sd", [2]), cell("d2sd", [4, 2] * 29, rows=64))
    plot_acceptance(made, tmp_path)
    joint, conditional = map(curves, figures[0].axes)
    assert joint == {"chain, 8 rows": ([1, 2], [0.5, 0.5]), "d2sd, 64 rows": ([1, 2, 3], [1.0, 0.5, 0.5])}
    assert conditional["d2sd, 64 rows"] == ([1.0, 2.0], [1.0, 0.5]), "of the 58 steps, 29 came to the third token"
    assert not conditional["chain, 8 rows"][0]
    plot_acceptance(result(cell("chain", [3, 1])), tmp_path)
    assert len(figures[1].axes) == 1, "an empty panel"


def test_reliability_leaves_empty_bins_out(tmp_path: Path, figures: list[Figure]) -> None:
    made = cell("chain", [2], calibration={"first": bins(b2=(100, 25, 10), b9=(40, 38, 40))})
    plot_calibration(result(made), tmp_path)
    first, counts = figures[0].axes  # none of the second drafter, which drafted nothing
    _, curve, few = first.lines  # the first is the diagonal
    assert points(curve) == ([0.25, 0.95], [0.1, 1.0])
    assert points(few) == ([], [])
    assert points(counts.lines[0]) == ([0.25, 0.95], [100, 40])
    legend = first.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["chain, 8 rows: ECE 0.121"]


def test_bins_of_few_tokens_are_pale_and_off_the_curve(tmp_path: Path, figures: list[Figure]) -> None:
    made = cell("chain", [2], calibration={"second": bins(b0=(5, 0.5, 2), b2=(100, 25, 10), b9=(30, 28.5, 30))})
    plot_calibration(result(made), tmp_path)
    _, curve, few = figures[0].axes[0].lines
    shown = [(x, y) for x, y in zip(*points(curve), strict=True) if y == y]
    assert shown == [(0.25, 0.1), (0.95, 1.0)]
    assert points(few) == ([0.1], [0.4])
    assert (few.get_linestyle(), few.get_alpha()) == ("None", 0.3)


def test_cost_bars_add_up_to_a_step(whole: Result, tmp_path: Path, figures: list[Figure]) -> None:
    plot_cost(whole, tmp_path)
    (figure,) = figures
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["1 in flight", "16 in flight"]
    for axes, concurrency in zip(figure.axes, (1, 16), strict=True):
        found = views.lines(whole, 0.0, concurrency)
        assert [tick.get_text() for tick in axes.get_yticklabels()] == [style.name(line) for line in found]
        ends = [0.0] * len(found)
        for stage in bars(axes).values():
            ends = [end + patch.get_width() for end, patch in zip(ends, stage.patches, strict=True)]
        cells = [views.pooled(whole, line, 0.0, concurrency)[0] for line in found]
        assert ends == pytest.approx([1e3 * metrics.step_seconds(one) for one in cells])


def test_cost_of_stages_nobody_knows_is_not_lost(tmp_path: Path, figures: list[Figure]) -> None:
    strange = cell("chain", [1], stage_seconds={"verify": 0.2, "think": 0.3, "nap": 0.1, "prefill": 7.0}, steps=2)
    plot_cost(result(strange), tmp_path)
    widths = {stage: drawn.patches[0].get_width() for stage, drawn in bars(figures[0].axes[0]).items()}
    assert widths == pytest.approx({"target verifies": 100.0, "other": 200.0})


def test_plain_steps_are_the_upper_axis(tmp_path: Path, figures: list[Figure]) -> None:
    plain = cell("off", [1], stage_seconds={"verify": 0.02}, steps=2)
    plot_cost(result(plain, cell("chain", [1], stage_seconds={"verify": 0.05}, steps=2)), tmp_path)
    axes = figures[0].axes[0]
    (upper,) = axes.child_axes
    figures[0].draw_without_rendering()
    assert upper.get_xlim()[1] == pytest.approx(axes.get_xlim()[1] / 10)
    plot_cost(result(cell("chain", [1], stage_seconds={"verify": 0.05})), tmp_path)
    assert figures[1].axes[0].child_axes == []


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


def test_unknown_methods_get_different_colours_in_a_panel(tmp_path: Path, figures: list[Figure]) -> None:
    plot_tau(result(*(cell(name, [2]) for name in NAMES)), tmp_path / "tau.png")
    (axes,) = figures[0].axes
    faces = {patch.get_facecolor() for container in bars(axes).values() for patch in container.patches}
    assert len(faces) == len(NAMES)


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
