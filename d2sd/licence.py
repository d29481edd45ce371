"""The licence of a checkpoint, as its folder states it: a name to show, not advice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from d2sd.errors import D2SDError, shortened
from d2sd.io import read_text
from d2sd.yaml_reader import parse_yaml

NOT_STATED = "not stated"
#: Of a model card, and of the front matter at its beginning.
_MAX_CARD, _MAX_FRONT = 1 << 20, 1 << 16
_FRONT = re.compile(r"\A---[^\S\n]*\n(.*?)\n---[^\S\n]*(?:\n|\Z)", re.DOTALL)
#: Words of licences under which the weights may not serve a business.
_NON_COMMERCIAL = re.compile(r"\bnc\b|non-?commercial|\bevaluation\b|\bresearch\b|\bacademic\b")


def read_licence(folder: Path) -> str:
    """The licence of a checkpoint's folder: what its model card names, else the first line of a LICENSE file."""
    return next((shortened(name) for name in _stated(folder) if name), NOT_STATED)


def warning(model: str, licence: str) -> str | None:
    """A line about a model whose licence does not allow commercial use; None for others."""
    if _NON_COMMERCIAL.search(re.sub(r"[\s_]+", " ", licence.lower())):
        return f"{model}: its licence, {licence}, does not allow commercial use"
    return None


def _stated(folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        return
    yield _of_card(folder / "README.md")
    for file in sorted(folder.iterdir()):
        if re.fullmatch(r"licen[cs]e(\.(md|txt))?", file.name.lower()):
            lines = _read(file).splitlines()
            first = next((line.strip(" #*") for line in lines if line.strip(" #*")), "")
            yield f"{first} ({file.name})" if first else ""


def _of_card(file: Path) -> str:
    """`license` of a model card's front matter, or `license_name` where that says more."""
    front = _FRONT.match(_read(file))
    if front is None or len(front[1]) > _MAX_FRONT:
        return ""
    try:
        card = parse_yaml(front[1], str(file))
    except D2SDError:
        return ""
    if not isinstance(card, dict):
        return ""
    told = card.get("license")
    names = [name for name in (told if isinstance(told, list) else [told]) if isinstance(name, str)]
    own = card.get("license_name")
    if isinstance(own, str) and (not names or names == ["other"]):
        names = [own]
    return ", ".join(names)


def _read(file: Path) -> str:
    """The text of a file; none where it cannot be read."""
    try:
        return read_text(file, error=D2SDError, what="model card", max_bytes=_MAX_CARD)
    except D2SDError:
        return ""
