"""Rows of a chain."""

from __future__ import annotations

import torch

from d2sd.modeling.rows import Rows


def test_chain_follows_each_context() -> None:
    rows = Rows.chain(3, torch.tensor([[1], [2]]), torch.tensor([0, 5]))
    assert rows.positions.tolist() == [[0, 1, 2], [5, 6, 7]]
    assert rows.attn_mask.tolist() == 2 * [[[True, False, False], [True, True, False], [True, True, True]]]
