"""The fleet benchmark: a sweep of made-up costs becomes tables and a plot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from benchmarks.fleet import report, sweep
from benchmarks.fleet.costs import StepCosts
from benchmarks.fleet.replayed import Check, Figures
from benchmarks.fleet.sweep import Results, Sweep
from d2sd.bench.latency import Spread
from d2sd.bench.provenance import provenance
from d2sd.runtime.request import Limits
from d2sd.viz import plot_style as style
from tests.benchmarks.fleet.helpers import engine_costs


def test_a_sweep_becomes_tables_and_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "SECONDS", 60.0)
    monkeypatch.setattr(sweep, "BEFORE", 20.0)
    monkeypatch.setattr(sweep, "MINUTE", 20.0)
    monkeypatch.setattr(sweep, "ANSWER", 8)
    limits = Limits(max_batch=4, max_context=1024, page_size=16, prefill_chunk=128)
    costs = StepCosts(kind="measured", source="made up", engines={"off": engine_costs(0.2, 4, prefill=0.001)})
    fleets = Sweep(costs, limits, 256)
    rate = 0.7 * fleets.saturated("off")
    cells = [fleets.cell("off", workers, rate) for workers in (2, 4)]
    for cell in cells:
        assert cell.rate == pytest.approx(rate * cell.workers)
        assert cell.moved
        assert cell.lost_tokens > 50 * cell.moved / 2
        assert cell.killed.ttft.p99 > cell.minute.ttft.p99
        assert cell.figures.tokens_per_second == pytest.approx(8 * cell.rate, rel=0.3)
    spread = Spread(mean=1, p50=1, p90=1, p99=1)
    figures = Figures(tokens=10, tokens_per_second=10.0, steps=10, ttft=spread, itl=spread)
    slower = figures.model_copy(update={"tokens_per_second": 8.0})
    check = Check(policy="off", concurrency=4, measured=figures, simulated=slower)
    assert check.errors()["tokens/s"] == pytest.approx(-0.2)
    results = Results(
        provenance=provenance({"name": "tiny"}, "cpu"), costs=costs, checks=[check], limits=limits, cells=cells,
        routers=[fleets.routed("kv", rate / 8)],
    )  # fmt: skip
    text = report.markdown(results)
    assert text.count("## Simulation") == 3
    assert "-20%" in text
    report.plot(results, tmp_path / "fleet.png")
    assert (tmp_path / "fleet.png").stat().st_size > 10_000

    drawn: list[Axes] = []
    monkeypatch.setattr(style, "finish", lambda figure, title, path: drawn.extend(figure.axes))
    same = [cell.model_copy(update={"policy": "auto"}) for cell in cells]
    report.plot(results.model_copy(update={"cells": [*cells, *same]}), tmp_path / "fleet.png")
    assert [panel.get_title(loc="left") for panel in drawn] == [
        "tokens a second, logarithmic: equal", "TTFT p99, ms, logarithmic", "ITL p99, ms"
    ]  # fmt: skip
    below, above = drawn[0].lines
    assert below.get_linewidth() > above.get_linewidth(), "equal engines hide each other"
    without, killed, *_ = (np.asarray(line.get_ydata()).tolist() for line in drawn[1].lines)
    assert without == [cell.minute.ttft.p99 for cell in cells], "not of the requests with which a kill is compared"
    assert killed == [cell.killed.ttft.p99 for cell in cells]
