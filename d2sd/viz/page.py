"""An HTML page of complete answers: self-contained, without network access; only its own script can run."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import cache
from typing import ParamSpec

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from d2sd.viz.record import Recording, Turn
from d2sd.viz.svg import inline, key
from d2sd.viz.text import asset, cut, text_markup, token_markup
from d2sd.viz.words import caption, introduction, mix, rescue, shade, story

P = ParamSpec("P")
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
        "text": _marked(text_markup),
        "token": _marked(token_markup),
        "tree": _marked(inline),
        "legend": _marked(_legend),
        "caption": lambda step, loop: caption(step, loop.index, loop.length),
        "figures": _figures,
        "sources": lambda turns: {node.source for turn in turns for node in turn.step.gained},
        "rescue": rescue,
        "story": story,
        "shade": shade,
    }
    return environment


def _marked(write: Callable[P, str]) -> Callable[P, Markup]:
    """A function of d2sd.viz.text or d2sd.viz.svg as a filter: they escape all generated text."""
    return lambda *args, **kwargs: Markup(write(*args, **kwargs))  # noqa: S704


def _legend(turns: Sequence[Turn]) -> str:
    return key([turn.step for turn in turns])


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
