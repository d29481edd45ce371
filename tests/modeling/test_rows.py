"""Rows of a chain, and the pool: which slot a committed token takes, and which slots nobody may touch."""

from __future__ import annotations

import torch

from d2sd.modeling.kv_pool import KVPool
from d2sd.modeling.rows import Rows


def test_chain_follows_each_context() -> None:
    rows = Rows.chain(3, torch.tensor([[1], [2]]), torch.tensor([0, 5]))
    assert rows.positions.tolist() == [[0, 1, 2], [5, 6, 7]]
    assert rows.attn_mask.tolist() == 2 * [[[True, False, False], [True, True, False], [True, True, True]]]


def test_write_puts_each_row_at_its_token() -> None:
    """Two layers, two requests whose pages interleave, positions out of order; a row not kept lands in page 0."""
    pool = KVPool(2, 5, 2, 1, 1, dtype=torch.float32, device="cpu")
    page_table = torch.tensor([[3, 1], [2, 4]])
    positions = torch.tensor([[2, 1, 1], [3, 0, 2]])
    keep = torch.tensor([[True, True, False], [True, True, True]])
    values = torch.tensor([[[10.0, 11, 12], [20, 21, 22]], [[30, 31, 32], [40, 41, 42]]])  # [L, B, T]
    values = values.view(2, 2, 3, 1, 1)
    pool.write(values, -values, page_table, positions, keep)
    expected = torch.tensor(
        [
            # page 1      2         3         4
            [[10.0, 0], [21, 0], [0, 11], [22, 20]],
            [[30.0, 0], [41, 0], [0, 31], [42, 40]],
        ]
    ).view(2, 4, 2, 1, 1)
    assert torch.equal(pool.k[:, 1:], expected)
    assert torch.equal(pool.v[:, 1:], -expected)


def test_padding_may_stand_past_the_last_page() -> None:
    """Bucket padding carries any position; not kept, it must neither fail nor touch a page of the request."""
    pool = KVPool(1, 2, 2, 1, 1, dtype=torch.float32, device="cpu")
    one = torch.ones(1, 1, 1, 1, 1)
    pool.write(one, one, torch.tensor([[1]]), torch.tensor([[99]]), torch.tensor([[False]]))
    assert not pool.k[:, 1:].any()
    assert not pool.v[:, 1:].any()
