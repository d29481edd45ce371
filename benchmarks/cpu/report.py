"""The result of `benchmarks.peers` as Markdown and as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.cpu.contestant import Key
from benchmarks.cpu.result import Figures, Result
from d2sd.viz import plot_style as style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEADERS = (
    "", "weights", "tokens/s", "× plain peer, same bits", "× plain peer", "ms a step", "prefill, ms a prompt",
    "answers equal",
)  # fmt: skip
_COLOURS = {"transformers": style.colour("chain"), "llama.cpp": style.colour("ddtree")}


def markdown(result: Result) -> str:
    """What was measured where, and a table for one request and for several in flight."""
    made, machine = result.provenance, result.machine
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    lines = [
        "# d2sd and its peers on a CPU", "",
        f"{made.date}, {made.machine['processor']}, {machine.threads} threads of {made.machine['cores']} cores; "
        f"memory read at {machine.read_gb_per_s:.1f} GB/s, fp32 products at {machine.gemm_gflops:.0f} GFLOP/s; "
        f"{versions}, commit {made.commit}; `{made.command}`.", "",
        f"Prompts: {result.prompts}; {result.max_new_tokens} new tokens, greedy. All contestants have the same "
        "weights and answer the same prompts in alternation.", "",
    ]  # fmt: skip
    for in_flight in _loads(result):
        lines += [f"## {_load(in_flight)}", "", *_table(_rows(result, in_flight)), ""]
    lines += [
        "Medians over the repetitions, least and greatest in brackets. Tokens/s has everything in it; a step is a pass "
        "of the target after the prefill. The prefill of a peer also gives its first token; d2sd's does not. The plain "
        "peer is the fastest contestant but d2sd that decodes without speculation, with weights of as many bits and of "
        "any. Equal: to d2sd's plain decoding, with bf16 weights for bf16 and fp32 weights for the others.", "",
        "A plain step reads every weight once. At the speed of memory that takes:", "",
        *_table([
            ["weights", "MB", "ms"],
            *([name, f"{floor.weight_bytes / 1e6:.0f}", f"{floor.ms:.1f}"] for name, floor in result.floors.items()),
        ]), "",
        *(f"{line}\n" for line in result.notes),
    ]  # fmt: skip
    return "\n".join(lines).rstrip("\n") + "\n"


def _rows(result: Result, in_flight: int) -> Iterator[Sequence[str]]:
    yield _HEADERS
    for one in result.figures:
        if one.in_flight == in_flight:
            yield [
                f"{one.key.product} {one.key.mode}", one.key.weights, _spread(one.tokens_per_second),
                *(_ratio(result.gain(one, same_bits=same)) for same in (True, False)),
                _spread(one.step_ms), f"{median(one.prefill_ms):.0f}", f"{one.equal} of {one.answers}",
            ]  # fmt: skip


def _table(rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> list[str]:
    first, *others = rows
    return [f"| {' | '.join(row)} |" for row in (first, ["---"] * len(first), *others)]


def plot(result: Result, path: Path) -> None:
    """Tokens a second of every contestant, with the range of the repetitions, and the limit of a plain step."""
    loads = _loads(result)
    figure, axes = style.panels(len(loads), 1, 0.5 + 0.3 * len(result.figures) / len(loads))
    for (panel,), in_flight in zip(axes, loads, strict=True):
        figures = [one for one in result.figures if one.in_flight == in_flight]
        middle = [median(one.tokens_per_second) for one in figures]
        below = [value - min(one.tokens_per_second) for value, one in zip(middle, figures, strict=True)]
        above = [max(one.tokens_per_second) - value for value, one in zip(middle, figures, strict=True)]
        bars = panel.barh(
            [str(one.key) for one in figures], middle, xerr=[below, above], color=[_colour(one.key) for one in figures],
            error_kw={"elinewidth": 1, "capsize": 2},
        )  # fmt: skip
        panel.bar_label(bars, fmt="{:.0f}", padding=6)
        if in_flight == 1:
            _mark_limits(panel, result, figures)
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        panel.grid(axis="x", color="#DDDDDD", linewidth=0.8)
        panel.set_title(f"{_load(in_flight)}: tokens a second", loc="left", fontsize=10)
    style.finish(figure, f"{result.provenance.bundle['name']} on {result.provenance.machine['processor']}", path)


def _mark_limits(panel: Axes, result: Result, figures: Sequence[Figures]) -> None:
    known = [(row, one.key.weights) for row, one in enumerate(figures) if one.key.weights in result.floors]
    rows, limits = [row for row, _ in known], [1e3 / result.floors[weights].ms for _, weights in known]
    panel.scatter(limits, rows, marker="|", s=180, color="#000000", label="limit of a plain step: weights read once")


def _colour(key: Key) -> str:
    return _COLOURS.get(key.product) or style.colour(key.mode)


def _loads(result: Result) -> list[int]:
    return sorted({one.in_flight for one in result.figures})


def _load(in_flight: int) -> str:
    return "One request at a time" if in_flight == 1 else f"{in_flight} in flight"


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.1f} ({min(values):.1f}..{max(values):.1f})"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
