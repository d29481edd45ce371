"""Comparisons of trees in the GPU suite: a fault in them would cost minutes of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from benchmarks.gpu.call import Wrong
from benchmarks.gpu.choices import Both, Inputs, acceptance, chain, growth, merge

CASES: dict[str, Callable[..., Both]] = {"chain": chain, "merge": merge, "growth": partial(growth, branches=7)}


@pytest.mark.parametrize("name", CASES)
def test_a_tree_equals_itself_and_none_with_another_token(name: str) -> None:
    both = CASES[name](Inputs(2, "cpu"), ties=True)
    tree = both.run()
    assert both.compare(tree, both.run()) == {}
    other = tree.tokens.clone()
    other[1, -1] += 1
    with pytest.raises(Wrong, match="tokens: 1 of"):
        both.compare(tree, replace(tree, tokens=other))


def test_an_accepted_path_equals_itself_and_no_longer_one() -> None:
    both = acceptance(Inputs(2, "cpu"), ties=True)
    accepted = both.run()
    assert both.compare(accepted, both.run()) == {}
    with pytest.raises(Wrong, match="count: 2 of 2 differ"):
        both.compare(accepted, replace(accepted, count=accepted.count + 1))
