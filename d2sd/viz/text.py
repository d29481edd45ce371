"""Escaping of generated text and prompts: XML stays well-formed, and invisible characters become visible."""

from __future__ import annotations

import unicodedata
from functools import cache
from html import escape
from importlib import resources

from rich.cells import cell_len

_SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥", "\x7f": "␡"} | {
    chr(c): chr(0x2400 + c) for c in range(32) if c not in (9, 10)
}
#: Controls, formats (bidirectional overrides among them), lone surrogates, private use, separators.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp", "Zs"}
#: Format characters that join letters and emoji: shown as signs in tokens, kept in running text.
_JOINERS = "\u200c\u200d"


@cache
def asset(name: str) -> str:
    """One of the package's style sheets or scripts."""
    return resources.files("d2sd.viz").joinpath(f"templates/{name}").read_text("utf-8")


def token_markup(text: str, most: int | None = None) -> str:
    """A token on one line, escaped: spaces and invisible characters as signs, cut to `most` cells."""
    return escape(cut(visible(text), most) if most else visible(text))


def text_markup(text: str) -> str:
    """Running text, escaped: line breaks and tabs stay, other invisible characters become signs."""
    return escape("".join(c if c in " \n\t" + _JOINERS else _sign(c) for c in text))


def visible(text: str) -> str:
    """Every character in a visible form."""
    shown = "".join(_SIGNS.get(c) or _sign(c) for c in text)
    return "◌" + shown if shown and unicodedata.category(shown[0]).startswith("M") else shown or "∅"


def cut(text: str, most: int) -> str:
    """At most `most` cells of a text; a longer one ends in an ellipsis."""
    if cell_len(text) <= most:
        return text
    while text and cell_len(text) > most - 1:
        text = text[:-1]
    return text + "…"


def _sign(character: str) -> str:
    if character in _SIGNS:
        return character if character == " " else _SIGNS[character]
    hidden = unicodedata.category(character) in _HIDDEN or ord(character) & 0xFFFE == 0xFFFE
    return f"‹{ord(character):X}›" if hidden or 0xFDD0 <= ord(character) <= 0xFDEF else character
