"""The plot of the prefix cache: what it names, and how it writes its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.load.figures import Sample
from benchmarks.load.plots import write_plots
from benchmarks.load.result import Cell, Key, Result, Run, Variant
from d2sd.bench.latency import Slo
from d2sd.bench.provenance import provenance
from d2sd.viz import plot_style as style


def test_the_prefix_cache_s_plot_names_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    panels: list[Axes] = []

    def finish(figure: Figure, title: str, path: Path) -> None:
        titles.append(title)
        panels.extend(figure.axes)

    monkeypatch.setattr(style, "finish", finish)
    slo = Slo(ttft=0.15, itl=0.05)
    one = Sample(ttft=12.0, itl=[1.0], e2e=13.0, tokens=2, prompt_tokens=700, cached_tokens=0, accepted=0)
    run = Run(samples=[one] * 90, seconds=1.0, cpu_seconds=1.0)
    cells = [Cell.of(Key(Variant("auto", cached), "prefix", 1), [run], slo) for cached in (False, True)]
    write_plots(Result(provenance=provenance({"name": "tiny"}, "cpu"), settings={}, slo=slo, cells=cells), tmp_path)
    assert titles == ["Prefix cache on and off: shared system prompt"]
    names = [f"shared system prompt,\ncache {state}" for state in ("off", "on")]
    assert [tick.get_text() for tick in panels[0].get_xticklabels()] == names
    assert panels[1].yaxis.get_major_formatter()(12000) == "12,000"
