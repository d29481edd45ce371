"""Copies of earlier text where somebody tries to break them: whose text is read, and texts made to mislead."""

from __future__ import annotations

import time

import pytest
import torch

from d2sd.plugins.lookup import Text, find_copy
from d2sd.plugins.trees import Draft
from d2sd.policies import FACTS
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.calibration import default_scores
from d2sd.runtime.speculation.policy import make_policy
from d2sd.runtime.stats import SequenceStats
from tests.runtime.helpers import BLOCK, BRANCHES, BUDGET, circling, make_engine, run_staggered
from tests.tiny import CASES, policy_name

COPYING = tuple(name for name in CASES if FACTS[policy_name(name)].copies)


def prompts(shared: int) -> list[tuple[int, ...]]:
    """Return six prompts that begin alike and end apart."""
    return [(*range(1, shared + 1), 40 + n, 3 * n + 1, 40 + n) for n in range(6)]


@pytest.mark.parametrize("policy", COPYING)
def test_copies_go_deeper_than_a_block(policy: str) -> None:
    """Up to the depth of the trees, in several steps, in requests of other lengths and with pages for few."""
    requests = [Request(prompt, 40, SamplingParams(n % 2 / 4, seed=n)) for n, prompt in enumerate(prompts(17))]
    plain = run_staggered(make_engine(circling(policy), "off"), requests, gap=1)
    engine = make_engine(circling(policy, 13), policy, pages=40, max_batch=6, lookup=True, row_budget=24)
    found = run_staggered(engine, requests, gap=1)
    assert [s.answer for s in found] == [s.answer for s in plain]
    lengths = SequenceStats.merged(s.stats for s in found).accepted
    assert max(lengths) == 13
    assert sum(count for length, count in lengths.items() if length > BLOCK) > 3


LONG = 2000


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "prompt",
    [(7,) * LONG, tuple(n % 2 for n in range(LONG)), (*(7,) * 14, 3) * (LONG // 15)],
    ids=["one token", "two tokens", "almost the longest match, everywhere"],
)
def test_a_prompt_that_repeats_two_thousand_times(prompt: tuple[int, ...]) -> None:
    runner = circling()
    policy = make_policy("hybrid", block_size=BLOCK, branches=BRANCHES, row_budget=BUDGET, lookup=True)
    answers = []
    for one in (make_policy("off", block_size=BLOCK, branches=1, row_budget=2), policy):
        engine = Engine(runner, one, Limits(1, 2048, 16, 512, None, False))
        answers.append(engine.generate([Request(prompt, 24)])[0].answer)
    assert answers[0] == answers[1]


def test_no_text_makes_the_search_slow() -> None:
    """2,000 tokens that all match but one: the search takes less than a millisecond."""
    seconds = {}
    first = Draft(torch.zeros(1, 7, 1, dtype=torch.long), torch.zeros(1, 7, 1))
    for name, tokens in {
        "different": range(LONG),
        "one token": [7] * LONG,
        "almost": [*[7] * 14, 3] * (LONG // 15),
        "ends apart": [*[7] * (LONG - 1), 3],
    }.items():
        pages = torch.tensor([*tokens, *[0] * LONG])[:LONG].view(-1, 16)
        table = torch.arange(len(pages))[None]
        text = Text(pages, table, torch.tensor([LONG - 1]), pages[-1, -1:].clone())
        best = 1.0
        for _ in range(5):
            start = time.perf_counter()
            find_copy(text, first, default_scores(7, "cpu"), torch.zeros(1))
            best = min(best, time.perf_counter() - start)
        seconds[name] = best
    assert max(seconds.values()) < 1e-3, seconds
