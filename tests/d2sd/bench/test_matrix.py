"""The cells of a benchmark."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from d2sd.bench.matrix import GROWING, Matrix, with_copies
from d2sd.bench.result import Key
from d2sd.recipe import Policy
from d2sd.runtime.speculation.policy import make_policy


def matrix(methods: list[str], **changes: Any) -> Matrix:
    axes: dict[str, Any] = {
        "rows": [16, 64],
        "sets": ["a"],
        "temperatures": [0.0],
        "concurrencies": [1],
        "block_size": 8,
    }
    return Matrix(methods, **(axes | changes))


def trees(methods: list[str], **changes: Any) -> list[tuple[str, int]]:
    return [(key.method, key.rows) for key in matrix(methods, **changes).keys()]  # noqa: SIM118  (no dictionary)


def test_methods_that_grow_have_every_budget_unless_they_name_one_and_others_their_own() -> None:
    grown = [("ddtree", 16), ("ddtree", 64)]
    assert trees(["chain", "ddtree", "lookup", "auto"]) == [
        ("off", 1),
        ("chain", 8),
        *grown,
        ("lookup", 8),
        ("auto", 64),
    ]
    named = [("hybrid", 8), ("chain", 4), ("auto", 32)]
    assert trees(["hybrid:8", "chain:4", "auto:32", "ddtree"]) == [("off", 1), *named, *grown]


def test_what_grows_is_what_a_larger_budget_gives_more_rows() -> None:
    grown = {
        name
        for name in get_args(Policy)
        if name != "auto"
        and make_policy(name, block_size=8, branches=7, row_budget=32).num_nodes
        > make_policy(name, block_size=8, branches=7, row_budget=16).num_nodes
    }
    assert grown == set(GROWING)


@pytest.mark.parametrize("methods", [["off"], ["off", "chain"], ["chain", "off"], []])
def test_plain_decoding_is_there_once_and_first(methods: list[str]) -> None:
    assert trees(methods) == [("off", 1), *([("chain", 8)] if "chain" in methods else [])]


@pytest.mark.parametrize("written", ["off:16", "off:2"])
def test_plain_decoding_has_one_row_whatever_was_asked(written: str) -> None:
    """A cell `off` with 16 rows would be plain decoding once more, under a name that says something else."""
    assert trees([written]) == [("off", 1)]


@pytest.mark.parametrize(
    "twice",
    [
        {"methods": ["ddtree", "ddtree"]},
        {"methods": ["ddtree:16", "ddtree"]},
        {"rows": [16, 64, 16]},
        {"sets": ["a", "a"]},
        {"temperatures": [0.0, 0.0]},
        {"concurrencies": [1, 1]},
    ],
)
def test_no_cell_is_there_twice(twice: dict[str, Any]) -> None:
    axes = {"methods": ["chain", "ddtree"]} | twice
    keys = list(matrix(**axes).keys())
    assert len(set(keys)) == len(keys) == len(dict.fromkeys(keys))


def test_every_combination_and_plain_decoding_before_what_is_compared_with_it() -> None:
    keys = list(matrix(["chain"], sets=["a", "b"], temperatures=[0.0, 1.0], concurrencies=[1, 4]).keys())
    assert set(keys) == {
        Key(method, rows, name, temperature, concurrency)
        for method, rows in (("off", 1), ("chain", 8))
        for name in "ab"
        for temperature in (0.0, 1.0)
        for concurrency in (1, 4)
    }
    assert len(keys) == 16
    for key in keys:
        plain = key._replace(method="off", rows=1)
        assert keys.index(plain) <= keys.index(key)
        # Answers are those of plain decoding at the lowest concurrency, which must have been measured before.
        assert keys.index(plain._replace(concurrency=1)) <= keys.index(key)


def test_every_policy_that_may_copy_is_measured_with_copies_and_without() -> None:
    assert with_copies(["off", "chain", "ddtree", "hybrid", "auto"]) == [
        *("off", "chain", "ddtree", "ddtree+lookup", "hybrid", "hybrid+lookup"),
        "auto+lookup",
    ]
