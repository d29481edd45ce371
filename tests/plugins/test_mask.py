"""Packed masks against the bits one by one."""

from __future__ import annotations

import pytest
import torch

from d2sd.plugins.cascade_attention.mask import pack_mask_bits


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64, 70])
def test_every_bit_is_its_pair(rows: int) -> None:
    attn_mask = torch.rand(2, rows, rows, generator=torch.Generator().manual_seed(rows)) < 0.5
    words = pack_mask_bits(attn_mask)
    assert words.dtype == torch.int32
    assert words.shape == (2, rows, -(-rows // 32))
    for request in range(2):
        for row in range(rows):
            bits = sum((word % 2**32) << 32 * place for place, word in enumerate(words[request, row].tolist()))
            assert bits == sum(int(seen) << column for column, seen in enumerate(attn_mask[request, row].tolist()))


def test_expanded_masks_pack_too() -> None:
    """A chain's mask is one [T, T] expanded over the batch."""
    chain = torch.ones(3, 3, dtype=torch.bool).tril()
    assert pack_mask_bits(chain.expand(2, 3, 3)).tolist() == 2 * [[[1], [3], [7]]]
