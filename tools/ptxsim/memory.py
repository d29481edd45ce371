"""Global memory: every tensor an allocation of its own, with gaps between them that no access may touch.

Checked at every access: it is aligned, it stays within one allocation, and a tensor that a kernel only reads is not
written. Blocks run in any order, and so do the warps of a block between two barriers (order.py). So no block may read
or write what another block writes, unless the other announced it: by an atomic addition with release, behind a barrier
that follows the write, to a number to which this block then adds with acquire, before a barrier that precedes the read.

Local memory is a thread's own: a stack, which the compiler uses for arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tools.ptxsim.order import Fault, Order
from tools.ptxsim.values import UNSIGNED, Array

#: Beyond 32 bits, so that addresses cut to 32 bits are noticed.
BASE = 0x7F00_0000_0000
#: Between tensors of which parts exist: beyond any offset in one of them.
FAR = 1 << 40
_ALIGNED, _GAP = 256, 4096
_NONE = -1


@dataclass(frozen=True)
class Placed:
    """A tensor's bytes, or those of several that overlap, copied to the device; `shift` is the address modulo 256.

    `far`: the address, less BASE, of a part of a tensor that is larger than what exists of it.
    """

    name: str
    data: Array  # [bytes] uint8
    writable: bool | Array  # [bytes]
    shift: int = 0
    used: bool | Array = True  # [bytes], False between the numbers of a strided tensor
    far: int | None = None


@dataclass(frozen=True)
class Lanes:
    """Lanes that access memory together [lanes]."""

    block: Array
    warp: Array
    epoch: Array  # between two barriers; other blocks have other numbers


class GlobalMemory:
    """Bytes of all tensors, by place: an address less BASE, or what a far address stands for."""

    def __init__(self, tensors: list[Placed]) -> None:
        self.tensors, self.places, end = tensors, [], _GAP
        for tensor in tensors:
            place = -(-end // _ALIGNED) * _ALIGNED + tensor.shift
            self.places.append(place)
            end = place + tensor.data.size + _GAP
        parts = sorted((t.far, t.data.size, place) for t, place in zip(tensors, self.places, strict=True) if t.far)
        self.far = np.array(parts, np.int64).reshape(-1, 3).T  # addresses, sizes and places
        size = -(-end // 16) * 16
        self.bytes = np.zeros(size, np.uint8)
        self.owner = np.full(size, _NONE, np.int16)  # index of the tensor; _NONE: a gap
        self.writable = np.zeros(size, bool)
        self.writer = np.full(size, _NONE, np.int32)  # block
        self.announced: dict[int, dict[int, int]] = {}  # place of a number -> block -> epoch in which it added to it
        # [block, other]: what the other wrote before `until` is certain to be seen after `since`; epochs.
        self.until = self.since = np.zeros((0, 0), np.int32)
        self.order = Order("global", size)
        self.read_bytes = self.written_bytes = 0
        for number, (tensor, place) in enumerate(zip(tensors, self.places, strict=True)):
            part = slice(place, place + tensor.data.size)
            self.bytes[part] = tensor.data
            self.owner[part], self.writable[part] = np.where(tensor.used, number, _NONE), tensor.writable

    def address(self, number: int) -> int:
        """Return a tensor's address."""
        far = self.tensors[number].far
        return BASE + (self.places[number] if far is None else far)

    def named(self, name: str) -> int:
        return [tensor.name for tensor in self.tensors].index(name)

    def data(self, number: int) -> Array:
        """Return what the tensor holds now."""
        place = self.places[number]
        return self.bytes[place : place + self.tensors[number].data.size]

    def load(self, address: Array, bits: int, count: int, by: Lanes, *, constant: bool = False) -> Array:
        """[lanes, count] numbers of `bits` bits. `constant`: through a cache that does not see writes."""
        size = bits // 8 * count
        place = self._check(address, size, by, write=False)
        self.read_bytes += place.size * size
        shared = self.writable[place]
        if shared.any():
            if constant:
                raise Fault("global read of what the kernel writes through the cache of constants")
            self.order.read(place[shared][:, None] + np.arange(size), by.epoch[shared], by.warp[shared])
        step = np.arange(count)
        numbers: Array = self.bytes.view(UNSIGNED[bits])[place[:, None] // (bits // 8) + step]
        return numbers

    def prefetch(self, address: Array, sizes: Array) -> None:
        """Check what lanes ask for: whole sixteens of bytes, of one tensor each, which the kernel does not write.

        Raises Fault.
        """
        if (address % np.uint64(16)).any() or (sizes % 16).any():
            raise Fault("misaligned prefetch")
        place = self._near(address.view(np.int64) - BASE)
        inside = (place >= 0) & (sizes > 0) & (place + sizes <= self.bytes.size)
        if not inside.all() or not (self.owner[place] == self.owner[place + sizes - 1]).all():
            raise Fault("prefetch out of bounds")
        if (self.owner[place] == _NONE).any() or self.writable[place].any():
            raise Fault("prefetch of what the kernel does not only read")

    def store(self, address: Array, numbers: Array, by: Lanes) -> None:
        """Numbers [lanes, count] of unsigned type."""
        size = numbers.shape[1] * numbers.itemsize
        place = self._check(address, size, by, write=True)
        self.order.write(place[:, None] + np.arange(size), by.epoch, by.warp)
        self.written_bytes += place.size * size
        at = place[:, None] // numbers.itemsize + np.arange(numbers.shape[1])
        store = self.bytes.view(numbers.dtype)
        store[at] = numbers
        if (store[at] != numbers).any():
            raise Fault("two lanes write different values to one address")
        self.writer[place[:, None] + np.arange(size)] = by.block[:, None]

    def add(
        self, address: Array, numbers: Array, by: Lanes, blocks: int, release: bool = True, acquire: bool = True
    ) -> Array:
        """Atomic additions [lanes], one after the other; returns what was there."""
        if not self.until.size:
            self.until, self.since = np.full((2, blocks, blocks), _NONE, np.int32)
        size = numbers.itemsize
        old, store = np.empty_like(numbers), self.bytes.view(numbers.dtype)
        for lane, (block, epoch) in enumerate(zip(by.block.tolist(), by.epoch.tolist(), strict=True)):
            one = slice(lane, lane + 1)
            lanes = Lanes(by.block[one], by.warp[one], by.epoch[one])
            place = int(self._check(address[one], size, lanes, write=True, atomic=True)[0])
            before = self.announced.setdefault(place, {})
            for other, theirs in before.items() if acquire else ():
                self.until[block, other], self.since[block, other] = theirs, epoch
            if release:
                before[block] = epoch
            old[lane] = store[place // size]
            store[place // size] += numbers[lane]
            self.writer[place : place + size] = block
        return old

    def _check(self, address: Array, size: int, by: Lanes, *, write: bool, atomic: bool = False) -> Array:
        what = "write" if write else "read"
        if (address % np.uint64(size)).any():
            raise Fault(f"misaligned global {what} of {size} bytes")
        place = self._near(address.view(np.int64) - BASE)
        inside = (place >= 0) & (place + size <= self.bytes.size)
        if not inside.all():
            raise Fault(f"global {what} at {hex(int(address[~inside][0]))}, far from every tensor")
        first, last = self.owner[place], self.owner[place + size - 1]
        good = (first != _NONE) & (first == last)
        if not good.all():
            raise Fault(f"global {what} out of bounds by {int((~good).sum())} lanes, {self._nearest(place[~good][0])}")
        if write and not self.writable[place].all():
            name = self.tensors[first[~self.writable[place]][0]].name
            raise Fault(f"global write to {name}, which the kernel must only read")
        writer = self.writer[place]
        other = np.flatnonzero((writer != _NONE) & (writer != by.block))
        if other.size and not (atomic and int(place[0]) in self.announced):
            pair = by.block[other], writer[other]
            seen = np.zeros(other.size, bool)
            if self.until.size:
                seen = (self.order.write_epoch[place[other]] < self.until[pair]) & (self.since[pair] < by.epoch[other])
            if not seen.all():
                raise Fault(f"global {what} of what another block writes")
        return place

    def _near(self, place: Array) -> Array:
        """Places of addresses less BASE; -1 of far ones where nothing is."""
        far = place >= FAR
        if not far.any():
            return place
        starts, sizes, places = self.far
        part = (np.searchsorted(starts, place, "right") - 1).clip(0)
        offset = place - starts[part]
        exists = (offset >= 0) & (offset < sizes[part])
        found: Array = np.where(far, np.where(exists, places[part] + offset, -1), place)
        return found

    def _nearest(self, place: int) -> str:
        distance = [
            max(start - place, place - start - tensor.data.size, 0)
            for tensor, start in zip(self.tensors, self.places, strict=True)
        ]
        number = int(np.argmin(distance))
        return f"at byte {place - self.places[number]} of {self.tensors[number].name}"


class LocalMemory:
    """Local memory of all lanes. Bytes that were not written must not be read."""

    def __init__(self, lanes: int, size: int) -> None:
        self.bytes, self.written = np.zeros((lanes, size), np.uint8), np.zeros((lanes, size), bool)

    def load(self, address: Array, bits: int, lanes: Array) -> Array:
        """[lanes, 1] numbers of `bits` bits."""
        at = self._places(address, bits // 8)
        if not self.written[lanes[:, None], at].all():
            raise Fault("local memory read before it was written")
        return self.bytes[lanes[:, None], at].view(UNSIGNED[bits])

    def store(self, address: Array, numbers: Array, lanes: Array) -> None:
        """Numbers [lanes, 1] of unsigned type."""
        at = self._places(address, numbers.itemsize)
        self.bytes[lanes[:, None], at], self.written[lanes[:, None], at] = numbers.view(np.uint8), True

    def _places(self, address: Array, size: int) -> Array:
        place = address.view(np.int64)
        if (place % size).any() or (place < 0).any() or (place + size > self.bytes.shape[1]).any():
            raise Fault(f"misaligned local access, or outside {self.bytes.shape[1]} bytes")
        places: Array = place[:, None] + np.arange(size)
        return places
