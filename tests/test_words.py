"""The prose of the product says things in the field's words: no private ones in docstrings, comments and messages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.test_layers import ROOMS, ROOT, TOP_ROOMS, files, room_of

#: Pattern -> what to write instead. Few false positives each; `ALLOWED` has those that remain.
BANNED = {
    r"told|tells|heard|hears": "reported, given, passed, printed",
    r"lies|lie": "is, is stored in",
    r"owed|owes|debts?": "pending, not yet written",
    r"(?<!there )(?:is|are|was|were) no (?!longer\b|more\b)[a-z]+": "is not a; or say what it is",
    r"stands? in|stands? beside|beside": "replaces; next to, in addition to",
    r"nobody|anybody|whoever|whomever": "the reader, the caller, a request: name who",
    r"in vain|by heart|at hand": "without effect, exactly, available",
}
#: File and phrase that is meant literally; one that is no longer there fails.
ALLOWED: frozenset[tuple[str, str]] = frozenset()


class Hit(NamedTuple):
    module: str
    line: int
    phrase: str  # the word, and two on either side
    instead: str


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every comment, docstring and message; code inside f-strings left out."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, " ".join(node.value.split())


def hits_in(module: str, source: str) -> list[Hit]:
    found = []
    for line, text in prose(source):
        for pattern, instead in BANNED.items():
            for match in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE):
                words = len(text[: match.start()].split())
                phrase = text.split()[max(words - 2, 0) : words + len(match.group().split()) + 2]
                found.append(Hit(module, line, " ".join(phrase), instead))
    return found


def hits_of(room: str) -> list[Hit]:
    return [
        hit
        for module, path in files().items()
        if (
            room_of(module) == room
            if room != "foundation"
            else path.parent.name == "d2sd" and room_of(module) == module
        )
        for hit in hits_in(module, path.read_text("utf-8"))
        if (hit.module, hit.phrase) not in ALLOWED
    ]


def test_words_checker_reads_prose_and_not_code() -> None:
    source = 'def told(lies):\n    """He has\n    heard it."""\n    return f"{told} is no graph"  # owed\n'
    found = sorted((hit.line, hit.phrase) for hit in hits_in("m", source))
    assert found == [(2, "He has heard it."), (4, "# owed"), (4, "is no graph")]
    assert not hits_in("m", '"""There is no GPU; it is no longer there; families, no more than that."""')


@pytest.mark.slow
def test_words_that_are_allowed_are_still_there() -> None:
    there = {(hit.module, hit.phrase) for m, path in files().items() for hit in hits_in(m, path.read_text("utf-8"))}
    assert there >= ALLOWED


@pytest.mark.parametrize("room", ["foundation", *ROOMS])
def test_words_of_the_product_are_the_fields(room: str) -> None:
    hits = hits_of(room)
    assert not hits, "\n".join(f"{hit.module}:{hit.line}: {hit.phrase!r}: {hit.instead}" for hit in hits)


_NO_SUBJECT = re.compile(
    r"(Of|As|What|Who|Which|It|Its|They|Their|This|That|These|Those|Both)\b|The same ?([,.:]|(as|of|for|to|up|with)\b)"
)


@pytest.mark.parametrize("folder", [*TOP_ROOMS, "benchmarks", "d2sd", "docs", "tests", "tools"])
def test_docstrings_begin_with_a_subject_or_a_verb(folder: str) -> None:
    """Not with "Of", "As" or "What", which leave both out, nor with a pronoun, which says neither."""
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                if _NO_SUBJECT.match(text):
                    wrong.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)
