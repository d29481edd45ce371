from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2sd.runtime.speculation.host_drafts import lookup
from tests.runtime import oracle
from tests.runtime.helpers import STEADY


@STEADY
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 8))
def test_equals_a_count_of_matching_tokens(tokens: list[int], count: int) -> None:
    before = list(tokens)
    assert lookup(tokens, count) == oracle.lookup(tokens, count)
    assert tokens == before


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1], []),
        ([1, 2, 3], []),
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),
        ([9, 1, 2, 3, 4, 5, 6, 7, 2, 3], [4, 5, 6, 7]),  # no more than asked for
        ([1, 2, 3, 7, 8, 2, 3, 9, 1, 2, 3], [7, 8, 2, 3]),  # three tokens before two, though these are nearer
        ([2, 3, 7, 2, 3, 8, 2, 3], [8, 2, 3, 8]),  # the last of equals
        ([0, 1, 2, 3, 5, 4, 1, 2, 3, 6, 0, 1, 2, 3], [6, 0, 1, 2]),  # a fourth token does not count
        ([5, 5], [5, 5, 5, 5]),  # what repeats goes on repeating
        ([5, 5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
    ],
)
def test_by_hand(tokens: list[int], expected: list[int]) -> None:
    assert lookup(tokens, 4) == expected
