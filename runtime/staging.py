"""Copies tensors of the host to the device at once: one pinned buffer, one copy, and no wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from d2sd.runtime.request import power_of_two

#: Bytes: addresses that are multiples of it let a kernel load 16 bytes at a time, and TensorRT requires them.
ALIGNMENT = 256
#: Pinned buffers that take turns.
BUFFERS = 2


class Staging:
    """The inputs of passes that follow each other without a step between them whose tokens the host reads.

    A buffer is written again only behind its last copy, so the host waits where it is `BUFFERS` passes ahead of the
    device, which has all of these to compute then.
    """

    def __init__(self, device: str, mark: Callable[[], Callable[[], None]]) -> None:
        """`mark` is that of a `Capture`."""
        self._device, self._mark = torch.device(device), mark
        self._hosts: list[Tensor] = []
        self._copied: list[Callable[[], None]] = []  # each waits for the last copy from that buffer
        self._turn = 0

    @torch.inference_mode()
    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same values on the device, in tensors of their own."""
        size = sum(aligned_sizes(tensors))
        self._grow(size)
        self._turn = (self._turn + 1) % BUFFERS
        self._copied[self._turn]()
        host = self._hosts[self._turn][:size]
        for part, tensor in zip(parts_like(host, tensors), tensors, strict=True):
            part.copy_(tensor)
        device = torch.empty(size, dtype=torch.uint8, device=self._device)
        device.copy_(host, non_blocking=True)
        self._copied[self._turn] = self._mark()
        return parts_like(device, tensors)

    def _grow(self, size: int) -> None:
        """Make the buffers large enough. Pinning memory is slow: the largest pass is run before the first request."""
        if self._hosts and len(self._hosts[0]) >= size:
            return
        for wait in self._copied:
            wait()
        pin = self._device.type == "cuda"
        self._hosts = [torch.zeros(power_of_two(size), dtype=torch.uint8, pin_memory=pin) for _ in range(BUFFERS)]
        self._copied = [_nothing] * BUFFERS


def aligned_sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Bytes of each of these tensors one behind the other, so that each begins at a multiple of `ALIGNMENT`."""
    return [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]


def parts_like(whole: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """`whole` [`sum(aligned_sizes(tensors))`] bytes as tensors like these."""
    parts = torch.split(whole, aligned_sizes(tensors))
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
    ]


def _nothing() -> None:
    pass
