"""Thoughts and answers of a thinking model: markers cut anywhere, in prompts that begin the thought or not."""

from __future__ import annotations

import random
import re
from itertools import combinations
from types import SimpleNamespace

import pytest

from d2sd.runtime.thought import MARKERS, Markers
from d2sd.serve.reasoning import Thought, unfinished

THINK = Markers("<think>", "</think>", 7, 8)
#: Answer, whether the prompt began its thought -> thought, said.
ANSWERS = [
    ("<think>\nSo.\n</think>\n\nYes.", False, "So.", "Yes."),
    (" \n<think>a</think>b", False, "a", "b"),
    ("So.\n</think>\n\nYes. ", True, "So.", "Yes. "),
    ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
    ("never ends </thin", True, "never ends </thin", ""),
    ("<think> cut \n", False, "cut", ""),
    ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
    ("\n Yes.", False, "", "\n Yes."),
    ("<thinking>a</think>", False, "", "<thinking>a</think>"),
    ("<thi", False, "", "<thi"),
    ("  ", False, "", "  "),
    ("", False, "", ""),
    ("", True, "", ""),
    ("a </think> b </think> c", True, "a", "b </think> c"),
    ("a\n\n b</think>\n", True, "a\n\n b", ""),
    ("<<think>a</think>b", False, "", "<<think>a</think>b"),
    ("a<</think>b", True, "a<", "b"),
]


def divided(pieces: list[str], *, begun: bool) -> tuple[str, str]:
    thought = Thought(THINK, True if begun else None)
    found = [thought.divide(piece, ends=number == len(pieces)) for number, piece in enumerate(pieces, 1)]
    return "".join(one for one, _ in found), "".join(one for _, one in found)


@pytest.mark.parametrize(("text", "begun", "thought", "said"), ANSWERS)
def test_an_answer_cut_at_every_place(text: str, begun: bool, thought: str, said: str) -> None:
    places = range(len(text) + 1)
    for cuts in [(), *combinations(places, 1), *combinations(places, 2)]:
        pieces = [text[a:b] for a, b in zip((0, *cuts), (*cuts, len(text)), strict=True)]
        assert divided(pieces, begun=begun) == (thought, said), pieces


def expected(text: str, *, begun: bool) -> tuple[str, str]:
    """By one expression over the whole text."""
    found = re.fullmatch(r"(?s)(?:\s*<think>)(.*?)(?:</think>(.*))?", "<think>" + text if begun else text)
    if found is None:
        return "", text
    return found[1].strip(), (found[2] or "").lstrip()


def test_random_streams() -> None:
    dice = random.Random(1)
    parts = ["<think>", "</think>", "<", "think", ">", "/", " ", "\n", "é", "<thi", "nk>", "a", "</th", "ink>", "x y"]
    for _ in range(10_000):
        pieces = [*dice.choices(parts, k=dice.randrange(12)), ""]
        begun = dice.random() < 0.5
        assert divided(pieces, begun=begun) == expected("".join(pieces), begun=begun), pieces


def test_only_what_may_begin_a_marker_is_held_back() -> None:
    thought = Thought(THINK, True)
    assert thought.divide("one two </thi", ends=False) == ("one two", "")
    assert thought.divide("s three", ends=False) == (" </this three", "")
    assert [unfinished(text, "<a>") for text in ("x", "x<", "x<a", "x<a>", "")] == [1, 1, 1, 4, 0]


@pytest.mark.parametrize(
    ("prompt", "answer", "count"),
    [
        ([1, 7], [1, 2, 8, 3], 3),
        ([1, 7, 2], [1, 2], 2),
        ([7, 8], [1, 2, 8], 0),  # a thought that the template has ended
        ([7, 1, 2], [1, 2], 0),  # of a user
        ([1], [7, 2, 8, 3], 3),
        ([1], [2, 7, 8], 3),
        ([1], [2, 3, 7, 8], 0),
        ([1], [], 0),
        ([1, 7], [], 0),
    ],
)
def test_tokens_of_a_thought(prompt: list[int], answer: list[int], count: int) -> None:
    assert THINK.tokens(prompt, answer) == count


class Tokenizer:
    """A letter a token, but for these words."""

    def __init__(self, template: object, words: tuple[str, ...] = (), special: tuple[str, ...] = ()) -> None:
        self.chat_template, self._words = template, words
        self.all_special_ids = [words.index(word) for word in special]

    def __call__(self, text: str, *, add_special_tokens: bool) -> SimpleNamespace:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[self._words.index(text)] if text in self._words else [99] * len(text))


def test_markers_are_those_of_the_template() -> None:
    for begin, end in MARKERS:
        words = begin, end
        template = f"{{{{ content.split('{end}')[-1] }}}}"
        assert Markers.of(Tokenizer(template, words)) == Markers(begin, end, 0, 1)
        assert Markers.of(Tokenizer(template)) is None, "several tokens"
        assert Markers.of(Tokenizer(template, words, words[1:])) is None, "not in the text of an answer"
        assert Markers.of(Tokenizer("{{ content }}", words)) is None
    assert Markers.of(Tokenizer(None)) is None
