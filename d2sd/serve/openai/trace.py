"""The steps of an answer as events, each with its tree as SVG, and the page at / that shows them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from d2sd.runtime.text import TextStream
from d2sd.serve.openai.generation import Generation
from d2sd.viz.record import Recording, Turn
from d2sd.viz.svg import inline
from d2sd.viz.text import asset
from d2sd.viz.words import counted, rescue, story

if TYPE_CHECKING:
    from d2sd.convert.bundle.load import Bundle

_MEDIA = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
#: Nothing but the page's own files, and no other page around it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)


@cache
def page_file(name: str) -> Response:
    """A file of the page."""
    text = resources.files("d2sd.serve.openai").joinpath(f"page/{name}").read_text("utf-8")
    if name == "page.css":
        text = asset("page.css") + asset("tree.css") + text
    headers = {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return Response(text, headers=headers, media_type=_MEDIA[name.rpartition(".")[2]])


def make_recording(bundle: Bundle) -> Recording:
    """Records one answer; its `add` is a watch of `AsyncEngine.submit`."""
    decode = bundle.tokenizer.decode
    return Recording("", decode, TextStream(partial(decode, skip_special_tokens=True)))


async def trace_events(generation: Generation, recording: Recording) -> AsyncIterator[dict[str, Any]]:
    """One event for each step, as soon as its output arrives."""
    sent = 0
    async for _ in generation.outputs():
        while sent < len(recording.turns):  # a slow reader gets several steps with one output
            yield _event(recording.turns[sent], generation)
            sent += 1


def _event(turn: Turn, generation: Generation) -> dict[str, Any]:
    step = turn.step
    title = f"{counted(len(step.gained), 'token')}{', ' * (step.saved > 0)}{rescue(step)}"
    sequence = generation.choices[0].stream.sequence
    return {
        "tokens": [{"text": text, "source": node.source} for node, text in turn.tokens],
        "accepted": len(step.gained) - 1,
        "saved": step.saved,
        "rows": step.rows,
        "policy": "" if sequence is None else next(reversed(sequence.stats.policies)),
        "title": title,
        "story": story(step),
        "svg": inline(step, title),
    }
