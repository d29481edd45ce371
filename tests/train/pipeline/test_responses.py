"""The pipeline cuts a turn that the target wrote: where it ends, and what stays in it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import pytest

from d2sd.progress import silent
from d2sd.train.data.prompts import Job
from d2sd.train.dist import Dist
from d2sd.train.pipeline.responses import ResponseGenerator
from d2sd.train_recipe import SelfWritten

STOP = 0


class Letters:
    """A tokenizer of one letter a token; id 0 is the end of a turn, written as a marker."""

    def decode(self, ids: list[int]) -> str:
        return "".join("<end>" if i == STOP else chr(i) for i in ids)


def said(text: str, end: str | None, *, stopped: bool) -> str:
    bundle = SimpleNamespace(tokenizer=Letters(), stop_token_ids=(STOP,))
    answering = ResponseGenerator(cast(Any, None), cast(Any, bundle), Path(), Dist(), silent, click.echo)
    ids = [ord(letter) for letter in text] + ([STOP] if stopped else [])
    job = Job("self/a/0", "def", SelfWritten(name="a", count=1, end=end))
    return answering._continuation(cast(Any, SimpleNamespace(answer=ids)), job)


@pytest.mark.parametrize(
    ("text", "end", "stopped", "kept"),
    [
        ("f(x)", None, True, "f(x)"),
        ("f(x):\nreturn", ":\n", False, "f(x):\n"),  # tokens may go on behind the text that ends the turn
        ("f(x)", ":\n", True, "f(x)"),  # its own end came first
        ("f:\ng:\n", ":\n", False, "f:\n"),  # the first one
    ],
)
def test_a_turn_ends_with_its_end(text: str, end: str | None, stopped: bool, kept: str) -> None:
    assert said(text, end, stopped=stopped) == kept


def test_a_marker_inside_stays_for_the_screen_to_see() -> None:
    assert said("a" + chr(STOP) + "b", None, stopped=True) == "a<end>b"
