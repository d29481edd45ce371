"""A page about whole answers: self-contained, no network, and nothing but its own script can run in it."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Collection, Sequence
from html import escape
from typing import TYPE_CHECKING

from d2sd.policies import FirstPass
from d2sd.viz.page_style import PAGE_STYLE, SCRIPT
from d2sd.viz.record import Recording
from d2sd.viz.steps import answer, bars, section
from d2sd.viz.style import TREE_STYLE
from d2sd.viz.svg import key
from d2sd.viz.text import cut, text_markup
from d2sd.viz.words import introduction

if TYPE_CHECKING:
    from d2sd.runtime.speculation.policy import Policy

#: Which steps a button opens: `data-show` and what it reads.
_BUTTONS = (("all", "open all"), ("saved", "only rescued"), ("none", "close all"))


def page(recordings: Sequence[Recording]) -> str:
    """HTML of one section for each answer."""
    policies = [policy for recording in recordings for policy in recording.policies.values()]
    title = " ".join(recordings[0].prompt.split())
    allowed = b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    security = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{security}">',
        f"<title>d2sd: {text_markup(cut(title, 60))}</title>",
        f"<style>\n{PAGE_STYLE}\n{TREE_STYLE}\n</style>\n</head>\n<body>\n<main>",
        f"<header>\n<h1>How {'this answer was' if len(recordings) == 1 else 'these answers were'} written</h1>",
        f'<p class="lead">{escape(introduction(policies))}</p>\n</header>',
        *(_article(number, recording) for number, recording in enumerate(recordings, 1)),
        f"</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _article(number: int, recording: Recording) -> str:
    name, turns = f"a{number}", recording.turns
    buttons = "".join(f'<button type="button" data-show="{what}">{label}</button>' for what, label in _BUTTONS)
    hint = (
        f"Each shaded stretch is what one step wrote: click it to see its tree. {_marks(recording.policies.values())}"
    )
    parts = [
        f'<article id="{name}">',
        f'<h2>Prompt</h2>\n<div class="prompt" dir="auto">{text_markup(recording.prompt)}</div>',
        _figures(recording),
        "<h2>Answer</h2>",
        f'<p class="hint">{hint}</p>',
        answer(name, turns),
        "<h2>Tokens of each step</h2>",
        bars(name, turns),
        "<h2>Step by step</h2>",
        f'<div class="tools"><div class="wide">{key([turn.step for turn in turns])}</div><span>{buttons}</span></div>',
        *(section(name, place, turns) for place in range(len(turns))),
        "</article>",
    ]
    return "\n".join(parts)


def _marks(policies: Collection[Policy]) -> str:
    if all(policy.first_pass is FirstPass.NONE for policy in policies):
        return ""
    second = (
        '<u class="second">violet</u>: from the second pass; '
        if any(p.second_pass is not None for p in policies)
        else ""
    )
    rescued = "<mark>Violet shade</mark>: the step gave more than the first draft’s best tokens alone would have."
    return f'Underlined {second}<u class="bonus">amber</u>: the target’s own; the rest: from the first draft. {rescued}'


def _figures(recording: Recording) -> str:
    turns, steps = recording.turns, len(recording.turns)
    gained = sum(len(turn.step.gained) for turn in turns)
    saved = sum(turn.step.saved > 0 for turn in turns)
    figures = [
        (", ".join(recording.policies), "policy", "how trees are drafted and built"),
        (str(sum(len(turn.pieces) for turn in turns)), "tokens", "of the answer"),
        (str(steps), "steps", "passes of the target; plain decoding needs one for each token"),
        (f"{gained / steps:.2f}", "tokens a step, τ", "bonus included; those past the end of the answer count"),
        (f"{saved / steps:.0%}", "steps rescued", "that gave more than the first draft's best chain alone would have"),
        (f"{sum(turn.step.rows for turn in turns) / steps:.0f}", "rows a step", "tree rows the target computes"),
    ]
    cells = (f'<div title="{escape(told)}"><b>{value}</b><span>{name}</span></div>' for value, name, told in figures)
    return f'<div class="figures">\n{"".join(cells)}\n</div>'
