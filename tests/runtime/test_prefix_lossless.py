"""A prefix hit gives the tokens of a miss: every policy, pools full of NaN wherever no request or cached prefix is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from d2sd.runtime.drafting import context as module
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence as Running
from tests.runtime.helpers import (
    BLOCK,
    all_pages,
    cheater,
    check_pages,
    copies,
    expected,
    free_pages,
    make_engine,
    placed,
    plain,
    run_staggered,
)
from tests.runtime.nan_pages import NaNPages
from tests.tiny import runner_of

PREFIX = tuple(random.Random(11).randrange(64) for _ in range(13))  # three pages of 4, and one token
KINDS = (SamplingParams(), SamplingParams(1.0), SamplingParams(0.8, top_p=0.9), SamplingParams(1.0, top_k=9))


@cache
def first_turns() -> tuple[Request, ...]:
    """Eight with a prefix in common: two are the same but for the seed, one is the prefix alone."""
    dice = random.Random(5)
    tails = [tuple(dice.randrange(64) for _ in range(length)) for length in (0, 1, 2, 3, 4, 7, 9)]
    return tuple(
        Request(PREFIX + tail, dice.randrange(6, 13), replace(KINDS[n % 4], seed=n + 1))
        for n, tail in enumerate([*tails, tails[-1]])
    )


@cache
def second_turns() -> tuple[Request, ...]:
    """The next question of each conversation."""
    return tuple(
        Request((*turn.prompt, *expected(turn), 7, 7), 8, replace(turn.sampling, seed=100 + turn.seed))
        for turn in first_turns()
    )


def nan_pages(case: str = "") -> NaNPages:
    turns = (*first_turns(), *second_turns())
    texts = {r.seed: r.prompt + plain(r.prompt, r.sampling, r.max_new_tokens + BLOCK) for r in turns}
    return NaNPages(*placed(case), texts)


def check(engine: Engine, requests: Sequence[Request], seed: int, gap: int = 0) -> list[Running]:
    order = list(range(len(requests)))
    random.Random(seed).shuffle(order)
    sequences = run_staggered(engine, requests, order=order, gap=gap)
    assert [s.answer for s in sequences] == [expected(r) for r in requests]
    assert free_pages(engine) == all_pages(engine)
    return sequences


def test_without_the_cache_nothing_is_shared() -> None:
    engine = make_engine(nan_pages(), "d2sd", max_batch=8, prefix_cache=False)
    for turns in (first_turns(), first_turns()):
        check(engine, turns, seed=1)
    assert engine.stats.prefix_hit_tokens == engine.stats.pages_cached == 0
    assert engine.stats.prefill_tokens == 2 * sum(len(r.prompt) - 1 for r in first_turns())


@pytest.mark.parametrize("cuda", [False, True])
def test_drafters_find_pages_whose_rows_are_still_pending(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding first, so that no drafter's K/V is written; then a policy of both drafters hits these pages.

    On CUDA no rows are dropped from the queue, which needs no GPU to be tried out.
    """
    monkeypatch.setattr(module, "MAX_PENDING_ROWS", 10**9)
    runner = nan_pages()
    engine = make_engine(runner, "off", max_batch=3, pages=40)
    runner.context._on_cpu = not cuda
    check(engine, first_turns(), seed=1)
    check(engine, second_turns()[:4], seed=1)
    assert min(runner.context.pending_rows.values()) > 100
    assert runner.pools[1].k.isnan().all(), "no drafter's K/V has been written"
    engine.policy = make_engine(cheater(()), "hybrid").policy
    running = [engine.submit(r) for r in (first_turns()[0], first_turns()[6], second_turns()[2])]
    while not all(one.stats.steps for one in running):
        engine.step()
        for one in running:
            if one.pages:
                check_pages(runner, torch.tensor(one.pages), one.tokens[: one.cached])
    assert min(one.stats.cached_tokens for one in running) >= 12
    while engine.busy:
        engine.step()
    assert [one.answer for one in running] == [expected(one.request) for one in running]


@pytest.mark.parametrize("cuda", [False, True])
def test_pages_are_evicted_and_reused_while_rows_are_pending(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old rows of a page never overwrite those of its new owner."""
    monkeypatch.setattr(module, "MAX_PENDING_ROWS", 10**9)
    runner = cheater((*first_turns(), *second_turns()))
    engine = make_engine(runner, "off", max_batch=2, pages=14)
    runner.context._on_cpu = not cuda
    check(engine, second_turns()[4:], seed=1)
    running = [engine.submit(replace(r, prompt=r.prompt[1:])) for r in second_turns()[:2]]
    for _ in range(6):
        engine.step()
    assert all(len(one.pages) > 6 and one.stats.steps for one in running)
    for one in running:
        check_pages(runner, torch.tensor(one.pages), one.tokens[: one.cached])


def test_tenants_do_not_share() -> None:
    request = first_turns()[5]
    engine = make_engine(nan_pages(), "chain")
    hits = []
    for salt in ("", "a", "b", "a"):
        (sequence,) = engine.generate([replace(request, cache_salt=salt)])
        assert sequence.answer == expected(request)
        hits.append(sequence.stats.cached_tokens)
    assert hits == [0, 0, 0, 16]


def test_hits_differ_from_misses_in_the_last_bits_only() -> None:
    """K/V of a prompt in one chunk, and of one whose prefix another request computed in chunks of three."""
    pools = []
    for first in (False, True):
        runner = runner_of(*copies()[:3])
        engine = make_engine(runner, "off", prefill_chunk=3 if first else 64)
        if first:
            engine.generate([Request(PREFIX, 1)])
        engine.submit(replace(first_turns()[6], max_new_tokens=20))
        for _ in range(9):
            engine.step()
        (running,) = engine.scheduler.running
        assert running.stats.cached_tokens == 12 * first
        pool, shared = runner.pools[0], list(running.pages[:5])
        pools.append(torch.stack([pool.k[:, shared], pool.v[:, shared]]))
    assert (pools[0] - pools[1]).abs().max() <= 1e-5 * pools[0].abs().max()
