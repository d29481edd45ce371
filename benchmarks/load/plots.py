"""Plots of a serving result: throughput and latency by load, and the prefix cache on and off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.load.figures import Figures
from benchmarks.load.result import Cell, Result, Workload
from d2sd.viz import plot_style as style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_plots(result: Result, folder: Path) -> list[Path]:
    """Write the plots that have data; returns their paths."""
    plots: dict[str, Callable[[Result, Path], bool]] = {
        "concurrency.png": lambda r, p: _by_load(r, "prompts", "requests in flight (closed loop)", p),
        "rate.png": lambda r, p: _by_load(r, "poisson", "requests a second (Poisson)", p),
        "prefix-cache.png": _prefix_cache,
    }
    return [folder / name for name, plot in plots.items() if plot(result, folder / name)]


def _by_load(result: Result, workload: Workload, label: str, path: Path) -> bool:
    lines: dict[str, list[Cell]] = {}
    for cell in result.cells:
        if cell.key.workload == workload:
            lines.setdefault(str(cell.key.variant), []).append(cell)
    if not lines:
        return False
    figure, axes = style.panels(1, 3, 4.4)
    rate = ("requests a second that meet the SLO", lambda f: f.goodput)
    speed = ("tokens a second", lambda f: f.tokens_per_second)
    panels: list[tuple[str, Callable[[Figures], float]]] = [
        rate if workload == "poisson" else speed,
        ("TTFT, ms: median, and p99 (dotted)", lambda f: f.ttft.p50),
        ("ITL, ms: mean, and p99 (dotted)", lambda f: f.itl.mean),
    ]
    tails: list[Callable[[Figures], float] | None] = [None, lambda f: f.ttft.p99, lambda f: f.itl.p99]
    for panel, (title, value), tail in zip(axes[0], panels, tails, strict=True):
        for name, cells in lines.items():
            _curve(panel, name, cells, value, tail)
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xlabel(label)
        panel.set_ylim(bottom=0)
    style.finish(figure, f"{result.provenance.bundle['name']} served: {workload}", path)
    return True


def _curve(
    panel: Axes,
    name: str,
    cells: list[Cell],
    value: Callable[[Figures], float],
    tail: Callable[[Figures], float] | None,
) -> None:
    amounts = [cell.key.amount for cell in cells]
    look: dict[str, Any] = style.curve(style.Line(name, 1))
    panel.plot(amounts, [value(cell.figures) for cell in cells], **look)
    if tail is not None:
        look |= {"linestyle": ":", "label": None}
        panel.plot(amounts, [tail(cell.figures) for cell in cells], **look)
    panel.set_xscale("log", base=2)
    panel.set_xticks(amounts, [f"{amount:g}" for amount in amounts])
    panel.minorticks_off()


def _prefix_cache(result: Result, path: Path) -> bool:
    cells = [cell for cell in result.cells if cell.key.workload in ("prefix", "turns")]
    if not cells:
        return False
    figure, axes = style.panels(1, 2, 4.0)
    words = {"prefix": "shared system prompt", "turns": "chats of several turns"}
    names = [f"{words[cell.key.workload]},\ncache {'on' if cell.key.variant.prefix_cache else 'off'}" for cell in cells]
    colours = [style.colour("hybrid" if cell.key.variant.prefix_cache else "off") for cell in cells]
    for panel, title, values in (
        (axes[0][0], "prompt tokens computed", [cell.figures.computed_prompt_tokens for cell in cells]),
        (axes[0][1], "mean TTFT, ms", [cell.figures.ttft.mean for cell in cells]),
    ):
        panel.bar_label(panel.bar(names, values, color=colours), fmt="{:,.0f}")
        panel.yaxis.set_major_formatter("{x:,.0f}")
        panel.set_title(title, loc="left", fontsize=10)
    shown = " and ".join(dict.fromkeys(words[cell.key.workload] for cell in cells))
    style.finish(figure, f"Prefix cache on and off: {shown}", path)
    return True
