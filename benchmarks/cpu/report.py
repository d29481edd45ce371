"""The result of `benchmarks.peers` as Markdown and as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.cpu.contestant import Key
from benchmarks.cpu.result import Figures, Result
from d2sd.bench.markdown import line_table
from d2sd.viz import plot_style as style

_HEADERS = (
    "",
    "weights",
    "tokens/s",
    "× plain peer, same bits",
    "× plain peer",
    "ms a step",
    "prefill, ms a prompt",
    "answers equal",
)
_LIMIT = "limit of a plain step: weights read once"
_COLOURS = {"transformers": style.colour("chain"), "llama.cpp": style.colour("ddtree")}


def markdown(result: Result) -> str:
    """Says where it was measured, with a table for one request and for several in flight."""
    made, machine = result.provenance, result.machine
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    lines = [
        "# d2sd and its peers on a CPU",
        "",
        f"{made.date}, {made.machine['processor']}, {machine.threads} threads of {made.machine['cores']} cores; "
        f"memory read at {machine.read_gb_per_s:.1f} GB/s, fp32 products at {machine.gemm_gflops:.0f} GFLOP/s; "
        f"{versions}, commit {made.commit}; `{made.command}`.",
        "",
        f"Prompts: {result.prompts}; {result.max_new_tokens} new tokens, greedy. All contestants have the same "
        "weights and answer the same prompts in alternation.",
        "",
    ]
    for in_flight in _loads(result):
        lines += [f"## {_load(in_flight)}", "", line_table(_HEADERS, _rows(result, in_flight)), ""]
    lines += [
        "Medians over the repetitions, least and greatest in brackets. Tokens/s has everything in it; a step is a pass "
        "of the target after the prefill. The prefill of a peer also gives its first token; d2sd's does not. The plain "
        "peer is the fastest contestant but d2sd that decodes without speculation, with weights of as many bits and of "
        "any. Equal: to d2sd's plain decoding, with bf16 weights for bf16 and fp32 weights for the others.",
        "",
        "A plain step reads every weight once. To read as many bytes, again and again with the same threads, takes at "
        "least, by the fastest of several kernels, the step's own among them:",
        "",
        line_table(
            ["weights", "MB", "ms"],
            ([name, f"{floor.weight_bytes / 1e6:.0f}", f"{floor.ms:.1f}"] for name, floor in result.floors.items()),
        ),
        "",
        *(f"{line}\n" for line in [*result.notes, *_beaten(result)]),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _beaten(result: Result) -> list[str]:
    return [
        f"A plain step with {weights} weights took {ms:.1f} ms, less than reading them: the machine was slower while "
        "that was measured. Measure again when nothing else runs."
        for weights, ms in result.beaten().items()
    ]


def _rows(result: Result, in_flight: int) -> Iterator[Sequence[str]]:
    for one in result.figures:
        if one.in_flight == in_flight:
            yield [
                f"{one.key.product} {one.key.mode}",
                one.key.weights,
                _spread(one.tokens_per_second),
                *(_ratio(result.gain(one, same_bits=same)) for same in (True, False)),
                _spread(one.step_ms),
                f"{median(one.prefill_ms):.0f}",
                f"{one.equal} of {one.answers}",
            ]


def plot(result: Result, path: Path) -> None:
    """Tokens a second of every contestant, with the range of the repetitions, and the limit of a plain step."""
    loads = _loads(result)
    figure, axes = style.panels(len(loads), 1, 0.5 + 0.3 * len(result.figures) / len(loads))
    for (panel,), in_flight in zip(axes, loads, strict=True):
        figures = [one for one in result.figures if one.in_flight == in_flight]
        middle = [median(one.tokens_per_second) for one in figures]
        below = [value - min(one.tokens_per_second) for value, one in zip(middle, figures, strict=True)]
        above = [max(one.tokens_per_second) - value for value, one in zip(middle, figures, strict=True)]
        panel.barh(
            [str(one.key) for one in figures],
            middle,
            xerr=[below, above],
            color=[_colour(one.key) for one in figures],
            error_kw={"elinewidth": 1, "capsize": 2},
        )
        limits = _limits(result, figures) if in_flight == 1 else {}
        panel.scatter(list(limits.values()), list(limits), marker="|", s=180, color="#000000", label=_LIMIT)
        for row, value in enumerate(middle):  # in a column: beside the bars they would cover limits and ranges
            text = f"{value:.0f} of {limits[row]:.0f}" if row in limits else f"{value:.0f}"
            panel.text(1.01, row, text, transform=panel.get_yaxis_transform(), va="center")
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        panel.grid(axis="x", color="#DDDDDD", linewidth=0.8)
        panel.set_title(f"{_load(in_flight)}: tokens a second", loc="left", fontsize=10)
    style.finish(figure, f"{result.provenance.bundle['name']} on {result.provenance.machine['processor']}", path)


def _limits(result: Result, figures: Sequence[Figures]) -> dict[int, float]:
    """Tokens a second that reading the weights allows, by the row of the contestant, which decodes plainly."""
    known = result.floors.keys() - result.beaten().keys()
    return {
        row: 1e3 / result.floors[one.key.weights].ms
        for row, one in enumerate(figures)
        if one.key.plain and one.key.weights in known
    }


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
