"""A short differential run, and that it finds what it looks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.plugins import choice
from d2sd.plugins.cpu import library
from d2sd.runtime.sampling.bias import TokenBias
from d2sd.runtime.sampling.sample import Sampling
from tests.runtime.differential import Episode


def differing(seeds: range) -> list[str]:
    found = []
    for seed in seeds:
        episode = Episode(seed).run()
        assert not episode.seen["leaked"]
        found += episode.differing
    return found


def test_requests_end_as_they_end_alone() -> None:
    """Some 80 steps; `python -m tests.runtime.differential` runs as many as one likes."""
    assert not differing(range(5))


@pytest.mark.slow
def test_requests_end_as_they_end_alone_for_longer() -> None:
    assert not differing(range(100, 112))


def test_a_rejected_token_that_is_broken_ends_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its embedding is NaN, and nothing is compiled: masked rows multiply their values by 0."""
    monkeypatch.setattr(library, "available", lambda: False)
    assert not differing(range(6_000_205, 6_000_206))


def test_rounding_may_decide_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens 5e-7 from each other, of which the filters keep one."""
    monkeypatch.setattr(library, "available", lambda: False)
    assert not differing(range(2050, 2051))


def _filters_of_all(scaled: Tensor, sampling: Sampling) -> Tensor:
    """min-p of the whole batch for each of its rows."""
    least = scaled.amax(-1, keepdim=True) + sampling.min_p.max().log()
    return scaled.masked_fill(scaled < least, -torch.inf)


def _select_nothing(self: TokenBias, rows: Tensor) -> Any:
    """The first rows in place of those that are left."""
    return self.select_before(torch.arange(len(rows)))  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "compiled"),
    [("filters", True), ("filters", False), ("bias", True), ("bias", False), ("not finite", True)],
)
def test_a_fault_is_found(fault: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(library, "available", lambda: False)
    if fault == "filters":
        monkeypatch.setattr("d2sd.plugins.choice.reference.apply_filters", _filters_of_all)
    elif fault == "bias":
        monkeypatch.setattr(TokenBias, "select_before", TokenBias.select, raising=False)
        monkeypatch.setattr(TokenBias, "select", _select_nothing)
    else:
        choose = choice.choose
        monkeypatch.setattr(choice, "choose", lambda *given: choose(*given).clamp(min=0))
    assert any(Episode(seed).run().differing for seed in (26, 12, *range(12)))
