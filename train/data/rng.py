"""Random choices of a training, each a function of the seed, its purpose and the index in the data order.

So neither an interruption nor the number of processes changes the training data.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import torch

from d2sd.train.dist import Dist


class SeededOrder:
    """The data order of one training over `sequences` sequences, `batch` per step over all processes."""

    def __init__(self, seed: int, sequences: int, batch: int, dist: Dist) -> None:
        self._seed, self._sequences, self._batch, self._dist = seed, sequences, batch, dist
        self._order = lru_cache(maxsize=2)(self._shuffled)  # a step may reach into the next epoch

    def numbers(self, step: int) -> range:
        """This process's indices into the data order, for one step."""
        return range(step * self._batch + self._dist.rank, (step + 1) * self._batch, self._dist.size)

    def index(self, number: int) -> int:
        """The sequence at an index of the data order: consecutive epochs, each a seeded shuffle."""
        epoch, i = divmod(number, self._sequences)
        return self._order(epoch)[i]

    def generator(self, purpose: str, number: int) -> torch.Generator:
        """A generator independent of all others. PyTorch uses 32 bits of a seed, so the seed is a hash."""
        digest = blake2b(f"{self._seed}/{purpose}/{number}".encode(), digest_size=4).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "big"))

    def _shuffled(self, epoch: int) -> list[int]:
        order: list[int] = torch.randperm(self._sequences, generator=self.generator("epoch", epoch)).tolist()
        return order
