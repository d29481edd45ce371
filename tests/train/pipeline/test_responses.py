"""The pipeline cuts a turn that the target wrote, and samples a share of the responses, by the prompts' ids alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import pytest

from d2sd.progress import silent
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.train.data.prompts import Job
from d2sd.train.dist import Dist
from d2sd.train.pipeline.responses import ResponseGenerator, response_sampling
from d2sd.train_recipe import Data, SampledResponses, SelfWritten

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
        ("a" + chr(STOP) + "b", None, True, "a<end>b"),  # a marker inside stays for the screen to see
    ],
)
def test_a_turn_ends_with_its_end(text: str, end: str | None, stopped: bool, kept: str) -> None:
    assert said(text, end, stopped=stopped) == kept


# --- A share of the responses is sampled -----------------------------------------------------------------------------

NAMES = [f"self/general/{n}" for n in range(2000)]


def test_without_a_share_all_are_greedy() -> None:
    assert {response_sampling(name, Data(prompts=[])) for name in NAMES} == {SamplingParams()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_the_share_is_kept(share: float) -> None:
    data = Data(prompts=[], sampled=SampledResponses(share=share, temperature=0.7))
    found = [response_sampling(name, data) for name in NAMES]
    sampled = [params for params in found if params.temperature]
    assert len(sampled) / len(NAMES) == pytest.approx(share, abs=0.03)
    assert {params.temperature for params in sampled} <= {0.7}
    assert len({params.seed for params in sampled}) == len(sampled)
    assert found == [response_sampling(name, data) for name in NAMES]


def test_a_larger_share_keeps_the_responses_of_a_smaller_one() -> None:
    """So that raising it in a recipe changes no response that is sampled already."""
    small, large = (Data(prompts=[], sampled=SampledResponses(share=share)) for share in (0.1, 0.3))
    few, more = ({name for name in NAMES if response_sampling(name, one).temperature} for one in (small, large))
    assert few < more
