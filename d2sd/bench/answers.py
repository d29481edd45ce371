"""Prints and draws the results of `generate`: answers in the order of their prompts, a tree, a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from d2sd.io import write_text
from d2sd.viz.page import page
from d2sd.viz.svg import standalone
from d2sd.viz.words import caption

if TYPE_CHECKING:
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.sequence import Sequence
    from d2sd.viz.record import Recording


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
