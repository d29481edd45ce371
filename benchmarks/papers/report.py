"""The page of the papers' experiments: tables with the papers' figures beside ours, and their plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.papers.experiments import COUNTS, D2SD, SAMPLED, SMALLER_BLOCKS, THRESHOLDS, Comparison
from benchmarks.papers.measure import Answer, Played
from d2sd.bench.bootstrap import tau_ratio
from d2sd.bench.markdown import NONE, line_table, number
from d2sd.runtime.evaluation import AcceptedLengths, Evaluation
from d2sd.runtime.stats import calibration_error, reliability_bins
from d2sd.viz.plot_style import colour, finish, panels

#: Answers by regime, then by set.
Answers = Mapping[str, Mapping[str, Sequence[Answer]]]

#: Upper ends of the parts of an answer and of the lengths of prompts, in tokens.
_POSITIONS = (64, 128, 256)
_CONTEXTS = (128, 256, 512, 1024, 2048)


def page(answers: Answers, plot: str | None) -> str:
    """Markdown of all tables; `plot` is the file name of the plot."""
    greedy, sampled = answers["greedy"], answers["sampled"]
    prompts = sum(map(len, greedy.values()))
    parts = [
        "# The papers' experiments",
        f"Made by `python -m benchmarks.papers`. τ: tokens a step, the target's own included, mean over prompts, "
        f"then over sets ({', '.join(greedy)}; {prompts} prompts); ranges: 95 % over prompts. The drafters are asked "
        "at every position once, and steps are played from what they say: exact, because the text does not depend on "
        "drafts. No copies, no `hybrid`: the seeds have neither.",
        "## D²SD (arXiv 2606.04446)",
        _compared(D2SD, answers),
        "## Noise shared by drafter and target, at T = 1",
        "Drafts are chosen with the noise by which the target chooses its tokens; D²SD and DFlash draft the likeliest.",
        _compared(SAMPLED, answers),
        "## τ by set, T = 0",
        _by_set(greedy),
        "## τ by set, T = 1",
        _by_set(sampled),
        "## DFlash (arXiv 2602.06036): smaller blocks, later tokens, longer contexts",
        _blocks(greedy),
        _by_position(answers["long"]),
        _by_context(answers["long"]),
        "## FlexDraft (arXiv 2605.20022): a verification length by confidence",
        "The rule of that paper on the chain of the first drafter: rows are verified while the product of "
        "probabilities is above a threshold.",
        _thresholds(greedy),
        "## Calibration, on prompts that were not fitted",
        "Expected error of the probability that a draft of `chain` is accepted, behind accepted ones.",
        _calibration(
            {f"{name}, T = {warm}": own for warm, sets in enumerate((greedy, sampled)) for name, own in sets.items()}
        ),
    ]
    if plot is not None:
        parts.insert(2, f"![τ by restarts, by verified rows, and by position in the answer]({plot})")
    return "\n\n".join(parts) + "\n"


def draw(answers: Answers, path: Path) -> None:
    """Write the plot, a PNG."""
    greedy, long = answers["greedy"], answers["long"]
    figure, [(left, middle, right)] = panels(1, 3, 3.6)
    taus = [_tau(greedy, f"d2sd {count}") for count in COUNTS]
    left.plot(COUNTS, taus, marker="s", color=colour("d2sd"), label="D²SD")
    left.axhline(
        _tau(greedy, "first twice 4"), color=colour("reanchor"), linestyle="--", label="DFlash twice, 4 restarts"
    )
    left.axhline(_tau(greedy, "samples 4"), color=colour("off"), linestyle=":", label="4 samples of one pass")
    left.axhline(_tau(greedy, "chain"), color=colour("chain"), label="DFlash")
    left.set(xlabel="restarts", ylabel="tokens a step")
    arms = ["chain", *(f"chain above {limit:g}" for limit in THRESHOLDS)]
    rows, taus = ([figure_of(greedy, arm) for arm in arms] for figure_of in (_rows, _tau))
    middle.plot(rows, taus, marker="o", color=colour("chain"))
    middle.set(xlabel="rows a step, a chain cut by confidence")
    spans = _spans(_POSITIONS)
    for arm, method, marker in (("chain", "chain", "o"), ("d2sd 4", "d2sd", "s")):
        taus = [_mean(_parts_of(long, arm, *span)) or float("nan") for span in spans]
        right.plot([f"{low} to {high}" for low, high in spans], taus, marker=marker, color=colour(method))
    right.set(xlabel="token of the answer")
    finish(figure, "The papers' experiments on this pair, T = 0", path)


def _evaluation(answers: Mapping[str, Sequence[Answer]], arm: str) -> Evaluation:
    """An arm on all sets."""
    requests = [
        AcceptedLengths(id=f"{name}/{answer.id}", accepted=answer.played[arm].accepted)
        for name, own in answers.items()
        for answer in own
        if answer.played[arm].accepted
    ]
    return Evaluation(method=arm, rows=1, requests=requests, calibration={})


def _tau(answers: Mapping[str, Sequence[Answer]], arm: str) -> float:
    """Mean over prompts, then over sets."""
    by_set = [_evaluation({name: own}, arm).tau for name, own in answers.items()]
    return sum(by_set) / len(by_set)


def _rows(answers: Mapping[str, Sequence[Answer]], arm: str) -> float:
    """Rows verified a step."""
    steps = [rows for own in answers.values() for answer in own for rows in answer.played[arm].nodes]
    return sum(steps) / len(steps)


def _compared(comparisons: Iterable[Comparison], answers: Answers) -> str:
    lines = []
    for one in comparisons:
        found = answers[one.regime]
        ratio = tau_ratio(_evaluation(found, one.against), _evaluation(found, one.arm))
        here = NONE
        if ratio is not None:
            here = _change(ratio.value)
            if ratio.interval is not None:
                here += f" ({_change(ratio.interval.low)} to {_change(ratio.interval.high)})"
        taus = f"{_tau(found, one.against):.2f} → {_tau(found, one.arm):.2f}"
        lines.append((one.title, taus, here, one.paper or NONE, one.remark))
    return line_table(["experiment", "τ", "here", "paper", ""], lines)


def _change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _by_set(answers: Mapping[str, Sequence[Answer]]) -> str:
    arms = next(iter(answers.values()))[0].played
    lines = [
        (
            arm,
            number(_rows(answers, arm), 1),
            *(number(_evaluation({name: own}, arm).tau) for name, own in answers.items()),
            number(_tau(answers, arm)),
        )
        for arm in arms
    ]
    return line_table(["drafts", "rows a step", *answers, "mean"], lines, aligned="---:")


def _blocks(greedy: Mapping[str, Sequence[Answer]]) -> str:
    arms = ["chain", *(f"chain in blocks of {rows}" for rows in SMALLER_BLOCKS)]
    lines = [(arm, number(_rows(greedy, arm), 1), number(_tau(greedy, arm))) for arm in arms]
    return line_table(["a drafter run in smaller blocks than it was trained for", "rows a step", "τ"], lines, "---:")


def _thresholds(greedy: Mapping[str, Sequence[Answer]]) -> str:
    arms = ["chain", *(f"chain above {limit:g}" for limit in THRESHOLDS)]
    lines = [(arm, number(_rows(greedy, arm), 2), number(_tau(greedy, arm))) for arm in arms]
    return line_table(["rows", "rows a step", "τ"], lines, "---:")


def _by_position(long: Mapping[str, Sequence[Answer]]) -> str:
    spans = _spans(_POSITIONS)
    lines = []
    for arm in ("chain", "d2sd 4"):
        parts = [_parts_of(long, arm, low, high) for low, high in spans]
        lines.append((arm, *(f"{number(_mean(part))} ({len(part)} steps)" for part in parts)))
    return line_table(["token of the answer", *(f"{low} to {high}" for low, high in spans)], lines)


def _by_context(long: Mapping[str, Sequence[Answer]]) -> str:
    lines = []
    for low, high in _spans(_CONTEXTS):
        some = {name: [one for one in own if low <= one.context < high] for name, own in long.items()}
        known = {name: own for name, own in some.items() if own}
        if known:
            count = sum(map(len, known.values()))
            taus = (number(_evaluation(known, arm).tau) for arm in ("chain", "d2sd 4"))
            lines.append((f"{low} to {high}", str(count), ", ".join(known), *taus))
    return line_table(["tokens of the prompt", "prompts", "sets", "chain", "d2sd 4"], lines)


def _calibration(sets: Mapping[str, Sequence[Answer]]) -> str:
    lines = []
    for name, own in sets.items():
        drafts = [draft for answer in own for draft in answer.drafts]
        errors = [calibration_error(reliability_bins((one[column], one[2]) for one in drafts)) for column in (0, 1)]
        lines.append((name, str(len(drafts)), *(number(error, 3) for error in errors)))
    return line_table(["set", "drafts", "as drafted", "calibrated"], lines, "---:")


def _spans(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip((0, *ends), ends, strict=False))


def _parts_of(answers: Mapping[str, Sequence[Answer]], arm: str, low: int, high: int) -> list[int]:
    """Tokens of the steps that began at these tokens of their answers."""
    found = []
    for own in answers.values():
        for answer in own:
            found += [length for begun, length in _begun(answer.played[arm]) if low <= begun < high]
    return found


def _begun(played: Played) -> list[tuple[int, int]]:
    """Each step's first token in the answer, from 0, and its length."""
    found, begun = [], 0
    for length in played.accepted:
        found.append((begun, length))
        begun += length
    return found


def _mean(lengths: Sequence[int]) -> float | None:
    return sum(lengths) / len(lengths) if lengths else None
