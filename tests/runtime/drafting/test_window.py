"""The part of a context that drafters read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d2sd.modeling.kv_pool import Rows
from d2sd.modeling.where import Where
from d2sd.runtime.drafting.window import Window
from tests.runtime.helpers import STEADY, expected, honest, make_engine, run_staggered, some_requests

PAGE = 4


@pytest.mark.slow
@STEADY
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(0, 3), st.integers(1, 5), st.integers(0, 3))
def test_the_first_pages_and_the_last(lengths: list[int], first: int, last: int, spare: int) -> None:
    """By a loop over tokens: those of the first pages, and of the last that hold any; each keeps its place."""
    used = [-(-length // PAGE) for length in lengths]
    width = max(max(used), 1) + spare
    table = torch.arange(1, 1 + len(lengths) * width).view(len(lengths), width)
    rows = Window(first, last).cut(Rows.chain(1, Where(table, torch.tensor(lengths))), PAGE)
    pages, context = rows.where.pages, rows.where.context_len
    assert pages.shape == (len(lengths), min(width, first + last))
    for row, length in enumerate(lengths):
        wanted = [
            (int(table[row, token // PAGE]), token % PAGE)
            for token in range(length)
            if token // PAGE < first or token // PAGE >= used[row] - last
        ]
        assert [(int(pages[row, n // PAGE]), n % PAGE) for n in range(int(context[row]))] == wanted


def test_a_window_of_tokens_is_whole_pages() -> None:
    assert [Window.of(tokens, 16) for tokens in (1, 31, 32, 250)] == [
        Window(0, 1),
        Window(0, 1),
        Window(1, 1),
        Window(1, 14),
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["d2sd", "hybrid", "flex_tree"])
def test_the_answers_stay_and_the_drafts_change(policy: str) -> None:
    requests = some_requests()
    taus = []
    for window in (None, Window(1, 8), Window(0, 1)):
        engine = make_engine(honest(case=policy), policy, max_batch=8, pages=40)
        engine.runner.drafts.window = window
        sequences = run_staggered(engine, requests, gap=1)
        assert [s.answer for s in sequences] == [expected(request) for request in requests]
        taus.append([dict(s.stats.accepted) for s in sequences])
    assert taus[0] == taus[1], "nothing is longer than that window"
    assert taus[0] != taus[2]
