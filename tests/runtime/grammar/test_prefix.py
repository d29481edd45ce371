"""A prefix hit gives the tokens of a miss under a grammar; requests with and without one share pages."""

from __future__ import annotations

import json
from functools import cache

import pytest

from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.scheduler import Scheduler
from d2sd.runtime.sequence import Sequence
from tests.runtime.grammar.tokens import END, guidance, ids
from tests.runtime.grammar.watched import WatchedRunner, constrained_text, models
from tests.runtime.helpers import all_pages, free_pages, make_engine, run_staggered
from tests.runtime.nan_pages import NaNPages
from tests.tiny import CASES

PREFIX = ids("Who is Ann? Oslo")  # three pages of 4, and a few tokens
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["Ann", 1]}}, "required": ["a"], "additionalProperties": False}


class Runner(WatchedRunner, NaNPages):
    """Both watch what is verified."""


@cache
def first_turns() -> tuple[Request, ...]:
    """Six with a prefix in common, two of them without a grammar; greedy and sampled."""
    tool = guidance()
    schema, word = tool.json_schema(json.dumps(SCHEMA), "json"), tool.regex("[a-f]{3,9}(-[0-9]{2}){2}", "regex")
    choice = tool.lark('start: "yes" | "no, never" | "maybe"', "choice")
    return tuple(
        Request((*PREFIX, *ids(tail)), 14, SamplingParams(n % 2, seed=n + 1), frozenset({END}), grammar=grammar)
        for n, (tail, grammar) in enumerate(
            [("", schema), ("", None), ("", word), ("?", choice), ("2024", None), ("2024", schema)]
        )
    )


@cache
def second_turns() -> tuple[Request, ...]:
    """The next question of each conversation, under the next one's grammar."""
    turns = first_turns()
    return tuple(
        Request(
            (*turn.prompt, *answer(turn), *ids("? ")),
            14,
            SamplingParams(n % 2, seed=n + 101),
            frozenset({END}),
            grammar=turns[n - 1].grammar,
        )
        for n, turn in enumerate(turns)
    )


@cache
def answer(request: Request) -> tuple[int, ...]:
    return tuple(constrained_text(models()[0], request))


def engine_for(policy: str, pages: int | None = None) -> Engine:
    turns = (*first_turns(), *second_turns())
    runner = Runner(turns, {turn.seed: [*turn.prompt, *answer(turn), *[7] * 8] for turn in turns}, case=policy)
    engine = make_engine(runner, policy, max_batch=6, pages=pages)
    runner.policy = engine.policy
    return engine


def check(engine: Engine, turns: tuple[Request, ...], gap: int) -> list[Sequence]:
    sequences = run_staggered(engine, turns, gap=gap)
    assert [tuple(one.answer) for one in sequences] == [answer(turn) for turn in turns]
    assert free_pages(engine) == all_pages(engine)
    return sequences


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [pytest.param(name, marks=[] if name in ("d2sd", "hybrid") else pytest.mark.slow) for name in CASES]
)
def test_hits_give_the_tokens_of_misses(policy: str) -> None:
    engine = engine_for(policy)
    assert check(engine, first_turns(), gap=0)[0].stats.cached_tokens == 0
    for turn, one in zip(first_turns(), check(engine, first_turns(), gap=1), strict=True):
        assert one.stats.cached_tokens == (len(turn.prompt) - 1) // 4 * 4
    for turn, one in zip(first_turns(), check(engine, second_turns(), gap=2), strict=True):
        assert one.stats.cached_tokens >= (len(turn.prompt) + len(answer(turn)) - 1) // 4 * 4


@pytest.mark.parametrize("policy", ["d2sd", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_hits_under_eviction_and_preemption(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A constrained request loses its pages in the middle of its answer, and goes on with what it finds of them."""
    lost: list[Sequence] = []
    preempt = Scheduler._preempt

    def spied(self: Scheduler, sequence: Sequence) -> None:
        if sequence.matcher is not None and len(sequence.answer) > 2:
            lost.append(sequence)
        preempt(self, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", spied)
    engine = engine_for(policy, pages=14)
    check(engine, first_turns(), gap=0)
    found = check(engine, second_turns()[::-1], gap=1)
    assert any(one in lost for one in found)
    assert all(one.stats.cached_tokens >= 12 for one in found)
    assert engine.stats.prefill_tokens > 14 * 4, "pages were evicted"
