"""A result as tables: the report in Markdown, with the definition of every metric, what `d2sd bench` ends with,
and a comparison of two: the effect of a change of code, drafters or machine on their common cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import cleandoc
from statistics import geometric_mean
from typing import NamedTuple

from rich.table import Table

from d2sd.bench import metrics
from d2sd.bench.markdown import NONE, Column, largest_bold, number, percent, rate, table
from d2sd.bench.metrics import (
    ADAPTIVE,
    PLAIN,
    Interval,
    View,
    compared,
    place,
    sets,
    tau_interval,
    tau_ratio,
    temperatures,
    views,
)
from d2sd.bench.result import Cell, Key, Result, ResultError
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
    for temperature in temperatures(result):
        first = views(result, temperature)[0]
        parts += [f"## Tokens a step (τ), {first}", tau_table(first)]
        parts += [f"### What a step did, all sets, {first}", detail_table(first)]
        if knowledge := knowledge_table(first):
            parts += [f"### What the drafters knew, all sets, {first}", knowledge]
        parts += [f"### Speed, all sets, T = {temperature:g}: tokens/s (speedup)", speed_table(result, temperature)]
        if chosen := chosen_table(result, temperature):
            parts += [f"### What `auto` served, all sets, T = {temperature:g}", chosen]
    parts += ["## Definitions", definitions(), "## Losslessness", lossless(result), "## Provenance", provenance(result)]
    return "\n\n".join(parts)


def tau_table(view: View) -> str:
    """τ by line and set; no mean if a set is missing, since it would not be comparable."""
    cells = [view.cells(line) for line in view.lines]
    names = [name for name in sets(view.result) if any(name in by_set for by_set in cells)]
    columns = _names(view.lines)
    for name in names:
        columns.append((name, largest_bold([by_set[name].tau if name in by_set else None for by_set in cells])))
    complete = [list(by_set.values()) if len(by_set) == len(names) else None for by_set in cells]
    means = [metrics.mean_tau(group) if group else None for group in complete]
    intervals = [tau_interval(group) if group else None for group in complete]
    return table([*columns, ("mean", largest_bold(means)), ("95 % interval", list(map(span, intervals)))])


def detail_table(view: View) -> str:
    pairs = [view.pooled(line) for line in view.lines]
    cells = [cell for cell, _ in pairs]
    columns = [
        *_names(view.lines),
        ("τ by token", largest_bold([metrics.tau_by_token(cell) for cell in cells])),
        ("rows/step", [number(metrics.rows_per_step(cell), 1) for cell in cells]),
        ("rows/token", [number(metrics.rows_per_token(cell), 1) for cell in cells]),
        ("nodes", [number(metrics.mean_nodes(cell), 1) for cell in cells]),
        ("merged", [number(metrics.merged_per_step(cell), 1) for cell in cells]),
        ("rescued", [percent(metrics.rescued_share(cell)) for cell in cells]),
        ("accepted by position", [" ".join(map(number, cell.joint_acceptance)) or NONE for cell in cells]),
        ("cycle cost", [number(metrics.cycle_cost(*pair)) for pair in pairs]),
        ("speedup", largest_bold([metrics.speedup(*pair) for pair in pairs])),
    ]
    return table(columns)


def knowledge_table(view: View) -> str | None:
    """Calibration and boundary ranks of the lines that have either; None if none has."""
    pooled = {line: view.pooled(line)[0] for line in view.lines}
    chosen = {line: cell for line, cell in pooled.items() if cell.calibration or cell.boundary_rank}
    if not chosen:
        return None
    columns = _names(list(chosen))
    for drafter in DRAFTER_NAMES[:2]:
        errors = [number(cell.calibration_errors.get(drafter), 3) for cell in chosen.values()]
        columns.append((f"ECE {drafter}", errors))
    return table([*columns, ("boundary rank", [_shares(metrics.boundary_ranks(cell)) for cell in chosen.values()])])


def speed_table(result: Result, temperature: float) -> str:
    """Tokens a second at each concurrency; a line may be measured at some of them only."""
    by_concurrency = views(result, temperature)
    lines = sorted({line for view in by_concurrency for line in view.lines}, key=place)
    columns = _names(lines)
    for view in by_concurrency:
        pairs = [view.pooled(line) if line in view.lines else None for line in lines]
        rates = largest_bold([metrics.tokens_per_second(pair[0]) if pair else None for pair in pairs], rate)
        speedups = [metrics.speedup(*pair) if pair else None for pair in pairs]
        texts = [f"{r} ({s:.2f})" if s is not None else r for r, s in zip(rates, speedups, strict=True)]
        columns.append((f"{view.concurrency} in flight", texts))
    return table(columns)


def chosen_table(result: Result, temperature: float) -> str | None:
    """The policies selected by `auto`, by concurrency; None if `auto` was not measured."""
    columns = [
        (f"{view.concurrency} in flight", [_shares(metrics.served(view.pooled(line)[0]))])
        for view in views(result, temperature)
        for line in view.lines
        if parse_method(line.method)[0] == ADAPTIVE
    ]
    return table(columns) if columns else None


def summary(result: Result) -> Table:
    """Return every method at its largest budget, all sets, at the lowest temperature and concurrency."""
    view = views(result, temperatures(result)[0])[0]
    shown = Table("policy", title=f"all sets, {view}", title_justify="left")
    for heading in ("row budget", "rows/step", "τ by token", "cost, in plain steps", "tokens/s", "speedup"):
        shown.add_column(heading, justify="right")
    for line in view.widest:
        cell, plain = view.pooled(line)
        cost, speedup = metrics.cycle_cost(cell, plain), metrics.speedup(cell, plain)
        rows = f"{metrics.rows_per_step(cell):.0f}"
        tau, speed = number(metrics.tau_by_token(cell)), rate(metrics.tokens_per_second(cell))
        shown.add_row(line.method, str(line.rows), rows, tau, number(cost), speed, number(speedup))
    return shown


def remarks(result: Result) -> Iterator[str]:
    """Yield the sentences below `summary`: when a policy pays, and whether the answers are plain decoding's."""
    yield "A policy pays where its τ by token exceeds the cost of its step."
    if result.provenance.device == "cpu":
        yield (
            "A CPU pays for each verified row: small trees are worth it, for one or two requests, and `auto` chooses "
            "among them. A GPU reads the weights once for all rows: at Qwen3-8B's size on an H100, two drafts and 64 "
            "rows took 1.50 plain steps (docs/gpu.md)."
        )
    cells = compared(result)
    different = sum(len(cell.differences) for cell in cells)
    yield f"{sum(len(cell.requests) for cell in cells)} answers compared with plain decoding's: {different} differ."


def definitions() -> str:
    lines = [f"- **{name}**: {' '.join(cleandoc(of.__doc__ or '').split())}" for name, of in DEFINITIONS.items()]
    lines.append("- **+lookup**: copies of earlier text compete with the drafts; a method without it makes none.")
    lines.append("- **all sets**: the requests of all sets as if they were one set; bold is the largest of its column.")
    return "\n".join(lines)


def lossless(result: Result) -> str:
    """Comparison with plain decoding at the lowest concurrency; differences beyond a near-tie are listed."""
    responses = sum(len(cell.requests) for cell in compared(result))
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


NOTES = """\
A ratio is B / A. τ of A, τ of B and their ratio use the prompts that both have; if they share none, all prompts,
without an interval. The interval is a 95 % percentile bootstrap in which a prompt's two responses are resampled
together; ▲ and ▼ mark intervals that exclude 1. The geometric mean excludes plain decoding, whose τ is 1; its
tokens/s ratio shows whether the two machines were equally fast."""


def compare(a: Result, b: Result) -> str:
    """Markdown: B / A of every common cell, and the cells that only one has. Raises `ResultError` if none is common."""
    old, new = ({cell.key: cell for cell in result.cells} for result in (a, b))
    common = sorted(old.keys() & new.keys(), key=_order)
    if not common:
        raise ResultError(
            "The two results have no cell in common.",
            found=f"A has {_summary(old)}; B has {_summary(new)}",
            expected="equal method, rows, set, temperature and concurrency in at least one cell",
        )
    pairs = [_pair(old[key], new[key]) for key in common]
    parts = ["## B against A", _unequal(a, b), _table(pairs)]
    parts += [_overall([pair for pair in pairs if pair.key.method != PLAIN])]
    parts += [_only("A", [k for k in old if k not in new]), _only("B", [k for k in new if k not in old]), NOTES]
    return "\n\n".join(filter(None, parts))


class _Pair(NamedTuple):
    """One cell in A and B; both τ are of the shared prompts if there are any."""

    key: Key
    before: float
    after: float
    interval: Interval | None
    shared: int
    prompts: int
    speed: float | None  # ratio of tokens per second

    @property
    def ratio(self) -> float:
        return self.after / self.before


def _pair(a: Cell, b: Cell) -> _Pair:
    ids = {r.id for r in a.requests} & {r.id for r in b.requests}
    x, y = (c.model_copy(update={"requests": [r for r in c.requests if r.id in ids or not ids]}) for c in (a, b))
    paired = tau_ratio(a, b)
    return _Pair(
        key=a.key,
        before=x.tau,
        after=y.tau,
        interval=paired.interval if paired else None,
        shared=len(ids),
        prompts=len(a.requests),
        speed=metrics.speedup(b, a),
    )


def _table(pairs: Sequence[_Pair]) -> str:
    return table(
        [
            ("method", [pair.key.method for pair in pairs]),
            ("row budget", [str(pair.key.rows) for pair in pairs]),
            ("set", [pair.key.set for pair in pairs]),
            ("T", [f"{pair.key.temperature:g}" for pair in pairs]),
            ("in flight", [str(pair.key.concurrency) for pair in pairs]),
            ("prompts", [f"{pair.shared} of {pair.prompts}" for pair in pairs]),
            ("τ A", [number(pair.before) for pair in pairs]),
            ("τ B", [number(pair.after) for pair in pairs]),
            ("τ ratio", [number(pair.ratio, 3) for pair in pairs]),
            ("95 % interval", [_marked(pair.interval) for pair in pairs]),
            ("tokens/s ratio", [number(pair.speed) for pair in pairs]),
        ]
    )


def _marked(interval: Interval | None) -> str:
    if interval is None:
        return NONE
    mark = "" if not interval.excludes(1) else " ▲" if interval.low > 1 else " ▼"
    return f"{interval.low:.3f} – {interval.high:.3f}{mark}"


def _overall(pairs: Sequence[_Pair]) -> str:
    if not pairs:
        return ""
    speeds = [pair.speed for pair in pairs if pair.speed]
    speed = f", tokens/s {geometric_mean(speeds):.3f}" if speeds else ""
    return f"**Geometric mean over {len(pairs)} cells: τ {geometric_mean([p.ratio for p in pairs]):.3f}{speed}**"


def _unequal(a: Result, b: Result) -> str:
    """The settings that differ, since they confound a ratio."""
    x, y = map(_circumstances, (a, b))
    differing = [f"{key} ({x.get(key, NONE)} | {y.get(key, NONE)})" for key in {**x, **y} if x.get(key) != y.get(key)]
    return f"Differs between A | B: {', '.join(differing)}." if differing else ""


def _circumstances(result: Result) -> dict[str, str | int]:
    of = result.provenance
    circumstances: dict[str, str | int] = {**result.settings.model_dump(), "device": of.device}
    circumstances |= {f"machine {key}": value for key, value in of.machine.items()}
    return circumstances | {f"bundle {key}": value for key, value in of.bundle.items()}


def _only(name: str, keys: Sequence[Key]) -> str:
    return "\n".join([f"Only in {name}:", "", *(f"- {key}" for key in sorted(keys, key=_order))]) if keys else ""


def _order(key: Key) -> tuple[float, int, tuple[int, str, int], str]:
    return key.temperature, key.concurrency, place(Line(key.method, key.rows)), key.set


def _summary(cells: dict[Key, Cell]) -> str:
    first = min(cells, key=_order)
    return f"{first}" + (f" and {len(cells) - 1} more" if len(cells) > 1 else "")
