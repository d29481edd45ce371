"""A result as markdown: tokens per step, step details, drafter calibration, speed; then the metric definitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import cleandoc

from d2sd.bench import metrics, views
from d2sd.bench.bootstrap import Interval, tau_interval
from d2sd.bench.markdown import NONE, Column, largest_bold, number, percent, rate, table
from d2sd.bench.result import Cell, Result
from d2sd.bench.views import ADAPTIVE
from d2sd.policies import DRAFTER_NAMES, parse_method
from d2sd.runtime.stats import calibration_error
from d2sd.viz.plot_style import Line

#: Column -> the function that computes it, whose docstring is its printed definition.
DEFINITIONS: dict[str, object] = {
    "τ": Cell.tau,
    "mean": metrics.mean_tau,
    "95 % interval": tau_interval,
    "τ by token": metrics.tau_by_token,
    "request-step": metrics.request_steps,
    "rows/step": metrics.rows_per_step,
    "rows/token": metrics.rows_per_token,
    "nodes": metrics.mean_nodes,
    "merged": metrics.merged_per_step,
    "rescued": metrics.rescued_share,
    "accepted by position": Cell.joint_acceptance,
    "served": metrics.served,
    "cycle cost": metrics.cycle_cost,
    "speedup": metrics.speedup,
    "ECE": calibration_error,
    "boundary rank": metrics.boundary_ranks,
    "tokens/s": metrics.tokens_per_second,
}


def tables(result: Result) -> str:
    """The whole report, without a final newline."""
    parts = []
    for temperature in views.temperatures(result):
        concurrency = views.concurrencies(result, temperature)[0]
        at = f"T = {temperature:g}, {concurrency} in flight"
        parts += [f"## Tokens a step (τ), {at}", tau_table(result, temperature, concurrency)]
        parts += [f"### What a step did, all sets, {at}", detail_table(result, temperature, concurrency)]
        if knowledge := knowledge_table(result, temperature, concurrency):
            parts += [f"### What the drafters knew, all sets, {at}", knowledge]
        parts += [f"### Speed, all sets, T = {temperature:g}: tokens/s (speedup)", speed_table(result, temperature)]
        if chosen := chosen_table(result, temperature):
            parts += [f"### What `auto` served, all sets, T = {temperature:g}", chosen]
    parts += ["## Definitions", definitions(), "## Losslessness", lossless(result), "## Provenance", provenance(result)]
    return "\n\n".join(parts)


def tau_table(result: Result, temperature: float, concurrency: int) -> str:
    """τ by line and set; no mean if a set is missing, since it would not be comparable."""
    lines = views.lines(result, temperature, concurrency)
    cells = [views.cells_of(result, line, temperature, concurrency) for line in lines]
    names = [name for name in views.sets(result) if any(name in by_set for by_set in cells)]
    columns = _names(lines)
    for name in names:
        columns.append((name, largest_bold([by_set[name].tau if name in by_set else None for by_set in cells])))
    complete = [list(by_set.values()) if len(by_set) == len(names) else None for by_set in cells]
    means = [metrics.mean_tau(group) if group else None for group in complete]
    intervals = [tau_interval(group) if group else None for group in complete]
    return table([*columns, ("mean", largest_bold(means)), ("95 % interval", list(map(span, intervals)))])


def detail_table(result: Result, temperature: float, concurrency: int) -> str:
    lines = views.lines(result, temperature, concurrency)
    pairs = [views.pooled(result, line, temperature, concurrency) for line in lines]
    cells = [cell for cell, _ in pairs]

    def column(metric: Callable[[Cell], float], form: Callable[[float | None], str]) -> list[str]:
        return [form(metric(cell)) for cell in cells]

    one_digit = partial(number, digits=1)
    accepted = [" ".join(map(number, cell.joint_acceptance)) or NONE for cell in cells]
    columns = [
        *_names(lines),
        ("τ by token", largest_bold([metrics.tau_by_token(cell) for cell in cells])),
        ("rows/step", column(metrics.rows_per_step, one_digit)),
        ("rows/token", column(metrics.rows_per_token, one_digit)),
        ("nodes", column(metrics.mean_nodes, one_digit)),
        ("merged", column(metrics.merged_per_step, one_digit)),
        ("rescued", column(metrics.rescued_share, percent)),
        ("accepted by position", accepted),
        ("cycle cost", [number(metrics.cycle_cost(*pair)) for pair in pairs]),
        ("speedup", largest_bold([metrics.speedup(*pair) for pair in pairs])),
    ]
    return table(columns)


def knowledge_table(result: Result, temperature: float, concurrency: int) -> str | None:
    """Calibration and boundary ranks of the lines that have either; None if none has."""
    pooled = {
        line: views.pooled(result, line, temperature, concurrency)[0]
        for line in views.lines(result, temperature, concurrency)
    }
    chosen = {line: cell for line, cell in pooled.items() if cell.calibration or cell.boundary_rank}
    if not chosen:
        return None
    errors = {
        drafter: [cell.calibration_errors.get(drafter) for cell in chosen.values()] for drafter in DRAFTER_NAMES[:2]
    }
    return table(
        [
            *_names(list(chosen)),
            *((f"ECE {drafter}", [number(value, 3) for value in values]) for drafter, values in errors.items()),
            ("boundary rank", [_shares(metrics.boundary_ranks(cell)) for cell in chosen.values()]),
        ]
    )


def speed_table(result: Result, temperature: float) -> str:
    concurrencies = views.concurrencies(result, temperature)
    measured = {c: set(views.lines(result, temperature, c)) for c in concurrencies}
    # A line may be measured at some concurrencies only; the order is that of `views.lines`.
    lines = sorted(set().union(*measured.values()), key=views.place)
    columns = _names(lines)
    for concurrency in concurrencies:
        pairs = [
            views.pooled(result, line, temperature, concurrency) if line in measured[concurrency] else None
            for line in lines
        ]
        rates = largest_bold([metrics.tokens_per_second(pair[0]) if pair else None for pair in pairs], rate)
        speedups = [metrics.speedup(*pair) if pair else None for pair in pairs]
        texts = [f"{r} ({s:.2f})" if s is not None else r for r, s in zip(rates, speedups, strict=True)]
        columns.append((f"{concurrency} in flight", texts))
    return table(columns)


def chosen_table(result: Result, temperature: float) -> str | None:
    """The policies selected by `auto`, by concurrency; None if `auto` was not measured."""
    cells = [
        (concurrency, views.pooled(result, line, temperature, concurrency)[0])
        for concurrency in views.concurrencies(result, temperature)
        for line in views.lines(result, temperature, concurrency)
        if parse_method(line.method)[0] == ADAPTIVE
    ]
    columns = [(f"{concurrency} in flight", [_shares(metrics.served(cell))]) for concurrency, cell in cells]
    return table(columns) if columns else None


def definitions() -> str:
    lines = [f"- **{name}**: {' '.join(cleandoc(of.__doc__ or '').split())}" for name, of in DEFINITIONS.items()]
    lines.append("- **+lookup**: copies of earlier text compete with the drafts; a method without it makes none.")
    lines.append("- **all sets**: the requests of all sets as if they were one set; bold is the largest of its column.")
    return "\n".join(lines)


def lossless(result: Result) -> str:
    """Comparison with plain decoding at the lowest concurrency; differences beyond a near-tie are listed."""
    responses = sum(len(cell.requests) for cell in views.compared(result))
    different = [(cell, case) for cell in result.cells for case in cell.differences]
    beyond = [(cell, case) for cell, case in different if not case.excused]
    lines = [
        f"{responses} responses compared with plain decoding: {len(different)} differ, {len(beyond)} beyond a tie."
    ]
    for cell, case in beyond:
        lines.append(f"- {cell.key}: {cell.requests[case.request].id}, token {case.token}, gap {case.gap:.1e}")
    return "\n".join(lines)


def provenance(result: Result) -> str:
    of, settings = result.provenance, result.settings.model_dump()
    pairs: dict[str, dict[str, str | int]] = {
        "machine": of.machine,
        "bundle": {**of.bundle},
        "versions": {**of.versions},
        "settings": settings,
    }
    lines = [f"- date: {of.date}", f"- command: `{of.command}`", f"- commit: {of.commit or 'unknown'}"]
    lines += [f"- device: {of.device}", *([f"- runs: {result.runs}"] if result.runs else [])]
    lines += [f"- {name}: {', '.join(f'{k} {v}' for k, v in values.items())}" for name, values in pairs.items()]
    return "\n".join(lines)


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{name}: {percent(share)}" for name, share in shares.items()) or NONE


def span(interval: Interval | None) -> str:
    return NONE if interval is None else f"{interval.low:.2f} – {interval.high:.2f}"


def _names(lines: Sequence[Line]) -> list[Column]:
    return [("method", [line.method for line in lines]), ("row budget", [str(line.rows) for line in lines])]
