"""Tokens per step by set, each method at its largest row budget, at the lowest temperature and concurrency."""

from __future__ import annotations

from pathlib import Path

from d2sd.bench import metrics, views
from d2sd.bench.result import Result
from d2sd.viz import plot_style as style

#: Of the place of a set, in which the points of all methods stand side by side.
_WIDTH = 0.7


def plot_tau_by_set(result: Result, path: Path) -> None:
    """One point a method and set; the sets are sorted by what the best method makes of them.

    Not written for a single set, or for plain decoding alone.
    """
    temperature = min(views.temperatures(result))
    concurrency = views.concurrencies(result, temperature)[0]
    found = {
        line: {name: metrics.mean_tau([cell]) for name, cell in cells.items()}
        for line in views.widest(result, temperature, concurrency)
        if line.method != views.PLAIN
        and len(cells := views.cells_of(result, line, temperature, concurrency)) == len(views.sets(result))
    }
    if len(views.sets(result)) < 2 or not found:
        return
    names = sorted(views.sets(result), key=lambda name: -max(taus[name] for taus in found.values()))
    figure, ((panel,),) = style.panels(1, 1, 4.6)
    for at, (line, taus) in enumerate(found.items()):
        places = [place + _WIDTH * ((at + 0.5) / len(found) - 0.5) for place in range(len(names))]
        panel.plot(places, [taus[name] for name in names], **style.points(line))
    for border in range(1, len(names)):
        panel.axvline(border - 0.5, color="#DDDDDD", linewidth=0.8)
    panel.set_xticks(range(len(names)), names, rotation=20)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("tokens a step (τ)")
    title = f"Tokens per step by kind of prompt, T = {temperature:g} (each method at its largest row budget)"
    style.finish(figure, title, path)
