"""The steps of an answer as events, each with its tree as SVG, and the page at / that shows them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import cache, partial
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from d2sd.runtime.text import TextStream
from d2sd.serve.openai.generation import Generation
from d2sd.viz.record import Recording, Turn
from d2sd.viz.svg import inline, key
from d2sd.viz.text import asset
from d2sd.viz.words import gain, shade, story

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle
    from d2sd.runtime.speculation.policy import Policy

_MEDIA = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
#: Nothing but the page's own files, and no other page around it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)


@cache
def page_file(name: str) -> Response:
    """A file of the page."""
    text = _read(name)
    if name == "page.css":
        text = asset("page.css") + asset("tree.css") + text
    return _response(text, name)


def page(names: Mapping[str, Policy], default: str) -> Response:
    """The page itself, with a choice of policies; `default` is the server's."""
    others = "".join(f"<option>{escape(name)}</option>" for name in names if name != default)
    options = f'<option value="">{escape(default)}, the server\'s</option>{others}'
    return _response(_read("index.html").replace("<!-- policies -->", options), "index.html")


def _read(name: str) -> str:
    return resources.files("d2sd.serve.openai").joinpath(f"page/{name}").read_text("utf-8")


def _response(text: str, name: str) -> Response:
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
            yield _event(recording.turns[sent])
            sent += 1


def _event(turn: Turn) -> dict[str, Any]:
    step = turn.step
    title = gain(step)
    return {
        "tokens": [{"text": text, "source": source} for source, text in turn.tokens],
        "accepted": len(step.accepted),
        "saved": step.saved,
        "shade": shade(step),
        "rows": step.rows,
        "policy": turn.policy,
        "tau": turn.tau,
        "title": title,
        "story": story(step),
        "svg": inline(step, title),
        "key": key([step]),
    }
