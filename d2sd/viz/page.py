"""An HTML page of complete answers: self-contained, without network access; only its own script can run."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from d2sd.viz.nodes import Step
from d2sd.viz.record import Recording, Turn
from d2sd.viz.svg import inline, key
from d2sd.viz.text import asset, cut, text_markup, token_markup
from d2sd.viz.words import caption, introduction, mix, rescue, shade, story

if TYPE_CHECKING:
    from jinja2.runtime import LoopContext

#: Steps that are open initially, in addition to all rescued ones.
_FIRST_OPEN = 3


def page(recordings: Sequence[Recording]) -> str:
    """HTML with a section for each answer. Texts of models and prompts are escaped by the template."""
    script = asset("page.js")
    template = _environment().get_template("page.html.j2")
    return template.render(
        recordings=recordings,
        title=cut(" ".join(recordings[0].prompt.split()), 60),
        introduction=introduction([policy for recording in recordings for policy in recording.policies.values()]),
        style=Markup(asset("page.css") + asset("tree.css")),  # noqa: S704  # our own files
        script=Markup(script),  # noqa: S704
        script_hash=b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        first_open=_FIRST_OPEN,
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("d2sd.viz"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "text": _text,
        "token": _token,
        "tree": _tree,
        "legend": _legend,
        "caption": _caption,
        "figures": _figures,
        "sources": _sources,
        "rescue": rescue,
        "story": story,
        "shade": shade,
    }
    return environment


# The next four return escaped markup: d2sd.viz.text and d2sd.viz.svg escape all generated text.


def _text(text: str) -> Markup:
    return Markup(text_markup(text))  # noqa: S704


def _token(text: str, most: int | None = None) -> Markup:
    return Markup(token_markup(text, most))  # noqa: S704


def _tree(step: Step, title: str) -> Markup:
    return Markup(inline(step, title))  # noqa: S704


def _legend(turns: Sequence[Turn]) -> Markup:
    return Markup(key([turn.step for turn in turns]))  # noqa: S704


def _caption(step: Step, loop: LoopContext) -> str:
    return caption(step, loop.index, loop.length)


def _sources(turns: Iterable[Turn]) -> set[str]:
    """The sources of the answer's tokens."""
    return {node.source for turn in turns for node in turn.step.gained}


def _figures(recording: Recording) -> list[tuple[str, str, str]]:
    """(value, name, explanation) of each metric of an answer."""
    turns, steps = recording.turns, len(recording.turns)
    tokens = sum(len(turn.pieces) for turn in turns)
    saved = sum(turn.step.saved > 0 for turn in turns)
    return [
        (mix(turn.policy for turn in turns), "policy", "how trees are drafted and built, by share of steps"),
        (str(tokens), "tokens", "of the answer"),
        (str(steps), "steps", "passes of the target; plain decoding needs one for each token"),
        (f"{turns[-1].tau:.2f}", "tokens a step, τ", "bonus tokens and those of the last step after the end included"),
        (f"{tokens / recording.seconds:.1f}", "tokens a second", "from the request to the last token, with its prompt"),
        (f"{saved / steps:.0%}", "steps rescued", "that accepted more than the first draft's top-1 chain"),
        (f"{sum(turn.step.rows for turn in turns) / steps:.0f}", "rows a step", "tree rows the target computes"),
    ]
