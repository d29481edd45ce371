"""The simulated fleets as Markdown and as a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.fleet.outcome import FleetFigures
from benchmarks.fleet.sweep import ANSWER, BEFORE, MINUTE, PROMPT, SECONDS, SLO, SPREAD, Cell, Results
from d2sd.bench.latency import Spread
from d2sd.bench.markdown import table
from d2sd.viz import plot_style as style


def markdown(results: Results) -> str:
    """The tables; what they mean is written by hand in docs/results."""
    made, first = results.provenance, results.cells[0]
    parts = [
        "# Fleets, simulated", f"{made.date}, {made.machine['processor']}; `{made.command}`.",
        "## Measured: step costs", f"{results.costs.source}; processor time.", _costs(results),
        "## Measured against simulated", _checks(results),
        "## Simulation: 1 to 64 workers",
        f"Poisson arrivals of {first.rate / first.workers:.3f} requests/s a worker, {PROMPT} prompt and {ANSWER} "
        f"output tokens, each ± {SPREAD:.0%}, for {SECONDS:.0f} s, of which the first {BEFORE:.0f} are not counted; "
        f"router least-loaded. Goodput: TTFT at most {SLO.ttft:g} s and mean ITL at most {1e3 * SLO.itl:g} ms.",
        _sizes(results.cells),
        "## Simulation: a killed worker",
        f"The same requests again, with a SIGKILL of one worker at {BEFORE:.0f} s that is back after 30 s: figures of "
        f"the requests that arrived in the {MINUTE:.0f} s after it, without and with the kill.",
        _kills(results.cells),
        "## Simulation: routers",
        "Eight workers, prompts of 600 tokens in eight groups that share 512 each; a worker's pages hold four "
        "requests, or the prefixes of five groups.",
        _routers(results),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _costs(results: Results) -> str:
    rows = []
    for engine, costs in results.costs.engines.items():
        for size, name in costs.served.items():
            empty, slope = costs.policies[name].seconds[size]
            rows.append((f"{engine}, {size}", name, f"{1e3 * empty:.1f}", f"{1e5 * slope:.2f}"))
    first = next(iter(results.costs.engines.values())).prefill
    calls = ", ".join(f"{rows}: {1e3 * seconds:.0f}" for rows, seconds in first)
    headings = ("engine, batch bucket", "policy", "step, ms", "for 100 tokens of context, ms")
    return _table(headings, rows) + f"\n\nPrefill call of the `off` engine, rows: ms: {calls}."


def _checks(results: Results) -> str:
    rows = [
        (f"{one.policy}, {one.concurrency}", f"{one.measured.tokens_per_second:.1f}",
         f"{one.simulated.tokens_per_second:.1f}", *(f"{error:+.0%}" for error in one.errors().values()))
        for one in results.checks
    ]  # fmt: skip
    errors = results.checks[0].errors() if results.checks else {}
    return _table(("engine, in flight", "tokens/s measured", "simulated", *(f"error: {name}" for name in errors)), rows)


def _sizes(cells: list[Cell]) -> str:
    rows = []
    for cell in cells:
        f = cell.figures
        rows.append((
            f"{cell.policy}, {cell.workers}", f"{cell.rate:.2f}", f"{f.tokens_per_second:.1f}", f"{f.goodput:.2f}",
            _pair(f.ttft), _pair(f.itl), f"{f.in_flight:.1f}", f"{f.utilization:.0%}",
        ))  # fmt: skip
    headings = (
        "engine, workers", "requests/s", "tokens/s", "goodput", "TTFT p50 / p99, ms", "ITL p50 / p99, ms",
        "requests a step", "time in steps",
    )  # fmt: skip
    return _table(headings, rows)


def _kills(cells: list[Cell]) -> str:
    rows = []
    for cell in cells:
        a, b = cell.minute, cell.killed
        rows.append((
            f"{cell.policy}, {cell.workers}", f"{a.ttft.p99:.0f} → {b.ttft.p99:.0f}",
            f"{a.itl.p99:.0f} → {b.itl.p99:.0f}", f"{a.goodput:.2f} → {b.goodput:.2f}",
            str(cell.lost_tokens), str(cell.moved), str(b.refused), str(cell.failed),
        ))  # fmt: skip
    headings = (
        "engine, workers", "TTFT p99, ms", "ITL p99, ms", "goodput", "context tokens lost", "moved",
        "refused", "failed",
    )  # fmt: skip
    return _table(headings, rows)


def _routers(results: Results) -> str:
    rows = []
    for one in results.routers:
        f = one.figures
        rows.append((one.router, f"{f.hit_rate:.0%}", _pair(f.ttft), _pair(f.itl), f"{f.utilization:.0%}"))
    return _table(("router", "prompt tokens cached", "TTFT p50 / p99, ms", "ITL p50 / p99, ms", "time in steps"), rows)


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return table([(name, [row[i] for row in rows]) for i, name in enumerate(headings)])


def _pair(latency: Spread) -> str:
    return f"{latency.p50:.0f} / {latency.p99:.0f}"


def _equal(cells: Sequence[Cell], value: Callable[[FleetFigures], float]) -> bool:
    """Whether all engines have the same figures at each size, within a percent."""
    sizes = {cell.workers: [value(one.figures) for one in cells if one.workers == cell.workers] for cell in cells}
    return all(max(found) <= 1.01 * min(found) for found in sizes.values())


def plot(results: Results, path: Path) -> None:
    """Throughput, TTFT and ITL by size of the fleet; latencies are those of the minute after a kill, without and with
    it.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    figure, axes = style.panels(1, 3, 4.4)
    panels: list[tuple[str, Callable[[FleetFigures], float]]] = [
        ("tokens a second, logarithmic", lambda f: f.tokens_per_second),
        ("TTFT p99, ms, logarithmic", lambda f: f.ttft.p99),
        ("ITL p99, ms", lambda f: f.itl.p99),
    ]
    for number, (panel, (title, value)) in enumerate(zip(axes[0], panels, strict=True)):
        for policy in dict.fromkeys(cell.policy for cell in results.cells):
            cells = [cell for cell in results.cells if cell.policy == policy]
            sizes = [cell.workers for cell in cells]
            look = style.curve(style.Line(policy, 1))
            if number == 0:  # wide below narrow: engines that are equally fast are both seen
                wide = {"linewidth": 6, "alpha": 0.5} if policy == results.cells[0].policy else {}
                panel.plot(sizes, [value(cell.figures) for cell in cells], **look | wide)
                title += ": equal" * (policy != results.cells[0].policy and _equal(results.cells, value))
                continue
            panel.plot(sizes, [value(cell.minute) for cell in cells], **look)
            look |= {"linestyle": ":", "label": f"{policy}, a worker killed"}
            panel.plot(sizes, [value(cell.killed) for cell in cells], **look)
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xlabel("workers")
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.minorticks_off()
        if number == len(panels) - 1:
            panel.set_ylim(bottom=0)
        else:
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter("{x:,.0f}")
    title = "Simulation: the same load for each worker; latencies in the minute after one is killed, or is not"
    style.finish(figure, title, path)
