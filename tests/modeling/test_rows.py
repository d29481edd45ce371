"""Rows of a chain, and of chunks of prompts."""

from __future__ import annotations

import torch

from d2sd.modeling.kv_pool import Chunks, Rows


def test_chain_follows_each_context() -> None:
    rows = Rows.chain(3, torch.tensor([[1], [2]]), torch.tensor([0, 5]))
    assert rows.positions.tolist() == [[0, 1, 2], [5, 6, 7]]
    assert rows.attn_mask.tolist() == 2 * [[[True, False, False], [True, True, False], [True, True, True]]]


def test_chunks_follow_each_context_one_behind_the_other() -> None:
    rows = Chunks.of([3, 1, 2], torch.tensor([[7, 3], [2, 0], [9, 4]]), torch.tensor([0, 1, 3]), page_size=4)
    assert rows.attn_mask.starts.tolist() == [0, 3, 4, 6]
    assert rows.attn_mask.spans() == [slice(0, 3), slice(3, 4), slice(4, 6)]
    assert rows.positions.tolist() == [[0, 1, 2, 1, 3, 4]]
    assert rows.pages.tolist() == [7, 7, 7, 2, 9, 4]
