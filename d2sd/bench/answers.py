"""Prints and draws the results of `generate`: answers in the order of their prompts, a tree, a page, statistics."""

from __future__ import annotations

import gc
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from d2sd.console import show_table
from d2sd.io import write_text
from d2sd.progress import bar
from d2sd.runtime.stats import COPY, FIRST_DRAFT, Clock, EngineStats, SequenceStats, mean_tau
from d2sd.viz.page import page
from d2sd.viz.svg import standalone
from d2sd.viz.words import caption

if TYPE_CHECKING:
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.request import Request
    from d2sd.runtime.sequence import Sequence
    from d2sd.viz.nodes import Recording


def write_answers(engine: Engine, prompts: dict[Sequence, str], recordings: dict[Sequence, Recording]) -> None:
    """Run to the end and print the answers in the order of their prompts: the first that is unfinished streams."""
    waiting = dict.fromkeys(prompts, "")  # answers that are not printed in full -> text that is not printed yet
    started: Sequence | None = None
    while engine.busy:
        for output in engine.step():
            waiting[output.sequence] += output.text
            if output.sequence in recordings and engine.trace is not None:
                recordings[output.sequence].add(engine.trace, output)
        while waiting:
            sequence = next(iter(waiting))
            if sequence is not started and len(prompts) > 1:
                click.secho(f"> {prompts[sequence]}", dim=True)
            started = sequence
            click.echo(waiting[sequence], nl=False)
            waiting[sequence] = ""
            if sequence.finish is None:
                break
            del waiting[sequence]
            click.echo("\n" if len(prompts) > 1 else "")
            if sequence.finish == "length":
                limit = (
                    f"[length limit of {sequence.request.max_new_tokens} tokens reached: --max-new-tokens raises it]"
                )
                click.secho(limit, err=True, dim=True)


def write_pictures(recordings: list[Recording], tree_svg: Path | None, html: Path | None) -> None:
    """Draw the tree of the step that accepted most, and write the page of all steps."""
    best = max(recordings, key=lambda recording: len(recording.turns[recording.best].pieces))
    step = best.turns[best.best].step
    if tree_svg is not None:
        write_text(tree_svg, standalone(step, caption(step, best.best + 1, len(best.turns))))
        click.echo(f"tree of the best step: {tree_svg}", err=True)
    if html is not None:
        write_text(html, page(recordings))
        click.echo(f"page of all steps: {html}", err=True)


def time_plain(make: Callable[[], Engine], requests: SequenceOf[Request], tokens: int) -> Clock:
    """The clock of plain decoding of the same requests to the same lengths: batch and context change as they did."""
    gc.collect()  # the engine before it may be held by a cycle
    engine = make()
    with bar("timing plain decoding", tokens) as advance:
        for output in engine.stream(requests):
            advance(len(output.tokens))
    return engine.clock


def show_stats(requests: SequenceOf[SequenceStats], engine: EngineStats, clock: Clock, plain: Clock) -> None:
    """Print the statistics of speculation to stderr. `plain` timed the same requests by plain decoding."""
    total = SequenceStats.merged(requests)
    cost = clock.step_seconds / plain.step_seconds
    speedup = plain.step_seconds * plain.steps / (clock.step_seconds * clock.steps)
    table = Table("statistic", "value", "meaning", title="speculation")
    row = table.add_row
    row("tau", f"{mean_tau(requests):.2f}", "tokens a step, bonus included: mean over requests")
    row("tau by token", f"{total.tau:.2f}", f"the same over all {total.steps} steps")
    row("trees", ", ".join(f"{name}: {steps}" for name, steps in total.policies.most_common()), "steps by policy")
    accepted = total.joint_acceptance()
    row(
        "accepted by position",
        " ".join(f"{share:.2f}" for share in accepted) or "none",
        "share of steps that accepted k drafts or more",
    )
    won = sorted(total.accepted_branches.items())
    known = {FIRST_DRAFT: "first draft", COPY: "copy of earlier text"}
    names = (known.get(proposer, f"branch {proposer}") for proposer, _ in won)
    row(
        "won by",
        ", ".join(f"{n} {c}" for n, (_, c) in zip(names, won, strict=True)) or "none",
        "steps with a draft accepted",
    )
    row(
        "rows verified",
        f"{total.verified_nodes / total.steps:.0f}",
        f"a step; {total.verified_nodes / total.tokens:.1f} for each token",
    )
    row("prefix hits", f"{engine.prefix_hit_rate:.0%}", "of the prompt tokens, taken from the prefix cache")
    row("cycle cost", f"{cost:.2f}", f"mean time of a step over that of {plain.steps} plain ones, of the same requests")
    row("speedup", f"{speedup:.2f}", "of all steps, prefill left out: above 1, speculation pays on this machine")
    stages = {name: seconds for name, seconds in clock.seconds.items() if name != "prefill"}
    whole = sum(stages.values())
    row("a step's time", ", ".join(f"{n} {s / whole:.0%}" for n, s in stages.items() if s / whole >= 0.005), "by stage")
    show_table(table, Console(stderr=True))
