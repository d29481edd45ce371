"""The plots of a result, one PNG each. A plot without data is not written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from d2sd.bench.plots.sets import plot_tau_by_set
from d2sd.bench.plots.speed import plot_speedup
from d2sd.bench.plots.tau import plot_tau_by_rows
from d2sd.bench.result import Result

PLOTS: dict[str, Callable[[Result, Path], None]] = {
    "tau-by-rows.png": plot_tau_by_rows,
    "tau-by-set.png": plot_tau_by_set,
    "speedup.png": plot_speedup,
}


def write_plots(result: Result, folder: Path) -> list[Path]:
    """Write all plots that have data into an existing folder, and remove those of an earlier result."""
    paths = [folder / name for name in PLOTS]
    for path, plot in zip(paths, PLOTS.values(), strict=True):
        path.unlink(missing_ok=True)
        plot(result, path)
    return [path for path in paths if path.exists()]
