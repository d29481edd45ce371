"""The parts of a page that go through an answer step by step."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from d2sd.viz.nodes import Step
from d2sd.viz.record import Turn
from d2sd.viz.svg import inline
from d2sd.viz.text import text_markup, token_markup
from d2sd.viz.words import caption, counted, rescue, story

_OPEN = 3  # the first steps are open, and all that were rescued


def answer(name: str, turns: Sequence[Turn]) -> str:
    """The text, one link a step, one mark a token."""
    parts = []
    for number, turn in enumerate(turns, 1):
        tokens = "".join(
            f'<span class="{node.source}">{text_markup(piece)}</span>'
            for node, piece in zip(turn.step.gained, turn.pieces, strict=False)
        )
        saved = " saved" if turn.step.saved else ""
        told = escape(caption(turn.step, number, len(turns)))
        parts.append(f'<a class="turn{saved}" href="#{name}s{number}" title="{told}">{tokens}</a>')
    return f'<div class="answer" dir="auto">{"".join(parts)}</div>'  # no blank between: blanks here are the answer's


def bars(name: str, turns: Sequence[Turn]) -> str:
    """A column for each step, a cell for each token."""
    parts = []
    for number, turn in enumerate(turns, 1):
        cells = "".join(f'<i class="{node.source}"></i>' for node in turn.step.gained)
        told = escape(caption(turn.step, number, len(turns)))
        parts.append(f'<a href="#{name}s{number}" title="{told}" aria-label="{told}">{cells}</a>')
    sources = {node.source for turn in turns for node in turn.step.gained}
    names = (("first", "first draft"), ("second", "second pass"), ("bonus", "target’s own"))
    keys = "".join(f'<span><i class="{kind}"></i>{label}</span>' for kind, label in names if kind in sources)
    return f'<div class="bars">{"".join(parts)}</div>\n<p class="keys">{keys}</p>'


def section(name: str, place: int, turns: Sequence[Turn]) -> str:
    """One step: what was drafted, what became of it, and its tree."""
    turn, number = turns[place], place + 1
    step, saved = turn.step, rescue(turn.step)
    tokens = "".join(f'<code class="{node.source}">{token_markup(node.text)}</code>' for node in step.gained)
    badge = f'<em class="badge">{escape(saved)}</em>' if saved else ""
    unused = len(step.gained) - len(turn.pieces)
    ended = f" The answer ended before the last {counted(unused, 'token')}." if unused else ""
    opened = " open" if number <= _OPEN or saved else ""
    return "\n".join(
        [
            f'<details id="{name}s{number}" class="{"saved" if saved else "plain"}"{opened}>',
            f'<summary><b>{number}</b><span class="tokens">{tokens}</span>{badge}</summary>',
            f"<p>{text_markup(story(step))}{ended}</p>",
            _compared(step),
            f'<div class="wide">{inline(step, caption(step, number, len(turns)))}</div>',
            "</details>",
        ]
    )


def _compared(step: Step) -> str:
    """The first draft above what was written, position by position."""
    if not step.draft:
        return ""
    length = max(len(step.draft), len(step.gained))
    head = "".join(f"<th>+{position}</th>" for position in range(1, length + 1))
    fates = ["right"] * step.right + ["wrong"] + ["moot"] * length
    drafted = (
        f'<td class="{fate}">{token_markup(text, 24)}</td>' for text, fate in zip(step.draft, fates, strict=False)
    )
    written = (f'<td class="{node.source}">{token_markup(node.text, 24)}</td>' for node in step.gained)
    return (
        f'<div class="wide"><table>\n<tr><td></td>{head}</tr>\n<tr><th>first draft</th>{"".join(drafted)}</tr>\n'
        f"<tr><th>written</th>{''.join(written)}</tr>\n</table></div>"
    )
