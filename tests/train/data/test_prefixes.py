"""How many tokens a second drafter is shown: the published distribution, and where a first draft goes wrong."""

from __future__ import annotations

import pytest
import torch

from d2sd.train.data.draws import draw_prefixes, first_errors


@pytest.mark.parametrize("base", [0.9, 0.5])
def test_prefixes_follow_their_distribution(base: float) -> None:
    count, size = 20_000, 8
    drawn = draw_prefixes(count, size, base, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == set(range(1, size))
    weights = [base**n for n in range(1, size)]
    statistic = sum(
        (int((drawn == n).sum()) - count * w / sum(weights)) ** 2 / (count * w / sum(weights))
        for n, w in enumerate(weights, 1)
    )
    assert statistic < 27.9  # chi-square with 6 degrees of freedom exceeds it once in 10,000


def test_the_smallest_block_shows_its_anchor_alone() -> None:
    assert draw_prefixes(9, 2, 0.9, torch.Generator()).tolist() == [1] * 9


def test_first_errors() -> None:
    tokens = torch.tensor([[5, 6, 7, 8]] * 5)
    drafted = torch.tensor([[5, 6, 7, 8], [9, 6, 7, 8], [5, 0, 7, 8], [5, 6, 7, 0], [5, 6, 0, 0]])
    assert first_errors(drafted, tokens).tolist() == [4, 4, 1, 3, 2]  # slot 0 is the anchor, whatever is drafted there
