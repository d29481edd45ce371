"""Errors speak the words of who reads them, and keep what was found as it is."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from copy import copy, deepcopy
from pathlib import Path

import pytest

import d2sd
from d2sd.errors import CLI, CLIENT, PYTHON, CheckpointError, ContextLengthExceeded, D2SDError


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (PYTHON, "choose another policy= or lower max_tokens"),
        (CLI, "choose another --policy or lower --max-new-tokens"),
        (CLIENT, "choose another policy or lower max_tokens"),
    ],
    ids=["Python", "command line", "client"],
)
def test_each_reader_gets_a_word_of_his_own(words: Mapping[str, str], wanted: str) -> None:
    error = D2SDError(
        "No {policy}.", where="{max_tokens}", found="{policy} {", fix="choose another {policy} or lower {max_tokens}"
    )
    lines = error.told(words).splitlines()
    assert lines[-1] == f"  fix: {wanted}"
    assert lines[-2] == "  found: {policy} {", "what a user wrote is quoted"
    assert not re.search(r"[{}]", lines[0] + lines[1])
    assert D2SDError("x {unknown} {}", fix="{}").told(words) == "x {unknown} {}\n  fix: {}"


def test_an_error_is_copied_and_moved_whole() -> None:
    error = ContextLengthExceeded("Too long.", where="a", found=5, expected="less", fix="lower {max_tokens}")
    assert str(error) == "Too long.\n  where: a\n  found: 5\n  expected: less\n  fix: lower max_tokens"
    for again in (copy(error), deepcopy(error), pickle.loads(pickle.dumps(error)), error.at("a")):
        assert (type(again), str(again), again.fix) == (type(error), str(error), error.fix)
    moved = CheckpointError("Bad.", where="a").at(Path("b"))
    assert (str(moved), type(moved)) == ("Bad.\n  where: b", CheckpointError)


def test_every_name_in_braces_has_a_word() -> None:
    """No message of the product names a setting that readers would see in braces."""
    source = Path(d2sd.__file__).parent
    named = set[str]()
    for file in [*source.rglob("*.py"), *(source.parent / "runtime").rglob("*.py")]:
        for text in re.findall(r"(?:fix|where|expected)=\"([^\"]*)\"", file.read_text()):
            named |= set(re.findall(r"\{(\w+)\}", text))
    assert named <= PYTHON.keys() == CLI.keys() == CLIENT.keys()
    assert named
