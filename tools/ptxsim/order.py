"""Record who used each byte since the last barrier of its block.

Between two `bar.sync` (an epoch) warps run in any order. So within an epoch a byte that one warp writes must not be
read or written by another, nor one that a warp reads be written by another.
"""

from __future__ import annotations

import numpy as np

from tools.ptxsim.values import Array

NEVER, SEVERAL = -1, -2


class Fault(Exception):  # what a GPU would do in silence
    """A kernel did what it must not do. The message ends with the instruction."""


class DividedWarp(Fault):
    """Some threads of a warp are at an instruction that takes all of them."""


class Order:
    """Order of accesses to one memory. `at` is places of bytes [accesses, bytes]; `epoch`, `warp`: of the accesses."""

    def __init__(self, memory: str, size: int) -> None:
        self.memory = memory
        self.writer, self.reader = np.full(size, NEVER, np.int16), np.full(size, NEVER, np.int16)  # warps
        self.write_epoch, self.read_epoch = np.full(size, NEVER, np.int32), np.full(size, NEVER, np.int32)

    def read(self, at: Array, epoch: Array, warp: Array) -> None:
        """Raises Fault where another warp wrote in this epoch."""
        epoch, warp = np.broadcast_to(epoch[:, None], at.shape), np.broadcast_to(warp[:, None], at.shape)
        if ((self.write_epoch[at] == epoch) & (self.writer[at] != warp)).any():
            raise Fault(f"{self.memory} race: read after another warp's write without bar.sync")
        before = (self.read_epoch[at] == epoch) & (self.reader[at] != warp)
        self.read_epoch[at], self.reader[at] = epoch, warp
        self.reader[at[before | (self.reader[at] != warp)]] = SEVERAL  # the latter: in this very access

    def write(self, at: Array, epoch: Array, warp: Array) -> None:
        """Raises Fault where another warp wrote or read in this epoch."""
        epoch, warp = epoch[:, None], warp[:, None]
        if ((self.write_epoch[at] == epoch) & (self.writer[at] != warp)).any():
            raise Fault(f"{self.memory} race: write after another warp's write without bar.sync")
        if ((self.read_epoch[at] == epoch) & (self.reader[at] != warp)).any():
            raise Fault(f"{self.memory} race: write after another warp's read without bar.sync")
        self.write_epoch[at], self.writer[at] = epoch, warp
