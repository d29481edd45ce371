"""The two conventions, and columns that follow their ids."""

from __future__ import annotations

import pytest
import torch

from d2sd.convert.checkpoint.layout import fault, from_convention, sort_columns, to_convention, usual_ids


def test_speculators_numbers_hidden_states_and_the_others_layers() -> None:
    assert to_convention((1, 9, 17), "hidden_states") == [2, 10, 18]
    assert from_convention([2, 10, 18], "hidden_states") == (1, 9, 17)
    assert to_convention((1, 9), "output_of_layer") == [1, 9]
    assert from_convention([1, 9], "output_of_layer") == (1, 9)


@pytest.mark.parametrize(
    ("layers", "target_layers", "expected"),
    [(5, 36, [1, 9, 17, 25, 33]), (8, 24, [1, 4, 7, 10, 12, 15, 18, 21]), (1, 36, [18])],
)
def test_what_readers_take_where_nothing_is_written(layers: int, target_layers: int, expected: list[int]) -> None:
    """The first is what z-lab's Qwen3-8B drafter has."""
    assert usual_ids(layers, target_layers) == expected


@pytest.mark.parametrize("ids", [[], [0, 0], [-1, 2], [0, 4]])
def test_ids_that_cannot_be(ids: list[int]) -> None:
    assert fault(ids, 4) == "ids of different layers, 0 to 3"
    assert fault([3, 0], 4) is None


def test_columns_follow_their_ids() -> None:
    fc = torch.arange(12.0).view(2, 6)  # three blocks of two columns, for layers 4, 0 and 2
    assert sort_columns(fc, (4, 0, 2)).tolist() == [[2, 3, 4, 5, 0, 1], [8, 9, 10, 11, 6, 7]]
