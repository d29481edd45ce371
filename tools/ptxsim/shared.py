"""Shared memory, and what may be wrong with the order in which warps and asynchronous units use it.

That of warps is order.py's. Two things run outside it:

- `cp.async` writes between its issue and the `wait_group` that waits for it, for the threads that wait; others need a
  barrier behind that.
- `wgmma` reads between its issue and its `wait_group`, through the asynchronous proxy: what threads or `cp.async`
  wrote before is only certain to be seen after `fence.proxy.async`.
"""

from __future__ import annotations

import numpy as np

from tools.ptxsim.order import SEVERAL, Fault, Order
from tools.ptxsim.values import Array


class SharedMemory:
    """Shared memory of all blocks, one behind the other. `at` is places of bytes in it, [accesses, bytes]."""

    def __init__(self, blocks: int, size: int) -> None:
        self.blocks, self.size = blocks, max(size, 16)
        total = blocks * self.size
        self.bytes = np.full(total, 0xFF, np.uint8)
        self.written = np.zeros(total, bool)
        self.order = Order("shared", total)
        self.epoch = np.zeros(blocks, np.int32)
        self.copying = np.zeros(total, bool)  # cp.async has been issued and not waited for
        self.fenced = np.zeros(total, bool)  # visible to the asynchronous proxy
        self.async_reads = np.zeros(total, np.int16)  # wgmma in flight

    def locate(self, block: Array, address: Array, size: int, align: int) -> Array:
        """Places of `size` bytes at each address."""
        place = address.astype(np.int64)
        if (place + size > self.size).any():
            raise Fault(f"shared access at {int(place.max())}, outside {self.size} bytes")
        if (place % align).any():
            raise Fault(f"misaligned shared access of {align} bytes")
        places: Array = (block * self.size + place)[:, None] + np.arange(size)
        return places

    def barrier(self, blocks: Array | slice) -> None:
        self.epoch[blocks] += 1

    # -- threads -------------------------------------------------------------------------------------------------------

    def load(self, at: Array, block: Array, warp: Array) -> Array:
        """Bytes [accesses, bytes]."""
        self.order.read(at, self.epoch[block], warp)
        if self.copying[at].any():
            raise Fault("shared memory read while cp.async is in flight")
        if not self.written[at].all():
            raise Fault("shared memory read before it was written")
        return self.bytes[at]

    def store(self, at: Array, data: Array, block: Array, warp: Array) -> None:
        """Bytes [accesses, bytes] of threads."""
        self._check_write(at, block, warp)
        self.bytes[at] = data
        if (self.bytes[at] != data).any():
            raise Fault("shared race: two lanes write different values to one address")
        self.written[at] = True

    def _check_write(self, at: Array, block: Array, warp: Array) -> None:
        self.order.write(at, self.epoch[block], warp)
        if self.copying[at].any():
            raise Fault("shared memory written while cp.async is in flight")
        if self.async_reads[at].any():
            raise Fault("shared memory written while wgmma in flight reads it")
        self.fenced[at] = False

    # -- cp.async ------------------------------------------------------------------------------------------------------

    def issue_copy(self, at: Array, block: Array, warp: Array) -> None:
        self._check_write(at, block, warp)
        self.copying[at] = True

    def land_copy(self, at: Array, data: Array, block: Array, warp: Array) -> None:
        """At the wait: from here the waiting threads may read, others after a barrier."""
        self.bytes[at], self.written[at], self.copying[at], self.fenced[at] = data, True, False, False
        self.order.write_epoch[at], self.order.writer[at] = self.epoch[block][:, None], warp[:, None]

    # -- the asynchronous proxy ----------------------------------------------------------------------------------------

    def fence(self, blocks: Array) -> None:
        """All threads of these blocks run fence.proxy.async: what they wrote so far is visible to wgmma."""
        self.fenced.reshape(self.blocks, self.size)[blocks] = True

    def load_async(self, at: Array, block: Array) -> Array:
        """Return what a wgmma reads, [blocks, bytes]: in flight from here to `end_async`."""
        if self.copying[at].any():
            raise Fault("wgmma reads shared memory while cp.async is in flight")
        if not self.written[at].all():
            raise Fault("wgmma reads shared memory before it was written")
        if not self.fenced[at].all():
            raise Fault("wgmma reads what threads or cp.async wrote without fence.proxy.async")
        epoch = self.epoch[block][:, None]
        if (self.order.write_epoch[at] == epoch).any():  # by all four warps, so none is the only writer
            raise Fault("shared race: wgmma reads what was written since the last bar.sync")
        self.order.read_epoch[at], self.order.reader[at] = epoch, SEVERAL
        np.add.at(self.async_reads, at, 1)
        return self.bytes[at]

    def end_async(self, at: Array, block: Array) -> None:
        """Each warp waits for its own part: another's part may still be reading until the next barrier."""
        np.add.at(self.async_reads, at, -1)
        self.order.read_epoch[at], self.order.reader[at] = self.epoch[block][:, None], SEVERAL
