"""Constants of passes over blocks: places of rows and the masks among them, made once: each op would be a launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention import pack_mask_bits

# Shape letters: R rows of a block, K blocks of a request, T = K · R.

#: Blocks of a request whose constants are made in advance; passes of more make theirs.
MOST_BLOCKS = 16


class BlockRows(NamedTuple):
    """Constants of the rows of K blocks, one block behind the other."""

    places: Tensor  # [T] int64, in its block
    same_block: Tensor  # [T, T] bool
    words: Tensor | None  # [T, ceil(T / 32)] int32, `same_block` in bits; None where nothing reads them


class BlockTables:
    """The constants of blocks of `size` rows, up to any number of them."""

    def __init__(self, size: int, device: str, *, in_bits: bool) -> None:
        """`in_bits`: kernels read the masks."""
        self._size, self._device, self._in_bits = size, device, in_bits
        self._tables = [self._made(count) for count in range(1, MOST_BLOCKS + 1)]

    def of(self, count: int) -> BlockRows:
        """Rows of `count` blocks."""
        while count > len(self._tables):
            self._tables.append(self._made(len(self._tables) + 1))
        return self._tables[count - 1]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [tensor for table in self._tables for tensor in table if tensor is not None]

    def _made(self, count: int) -> BlockRows:
        number = torch.arange(count * self._size, device=self._device)
        block = number // self._size
        same_block = block[:, None] == block
        words = pack_mask_bits.reference(same_block[None])[0] if self._in_bits else None
        return BlockRows(number % self._size, same_block, words)
