"""CUDA graphs: the launches of a function, recorded once and repeated by one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

#: Runs before a capture: kernels are compiled, libraries loaded and workspaces allocated by then.
_WARM_UPS = 2


class Capture(Protocol):
    """Records what a function does on the device; a stand-in records it on a CPU."""

    def __call__(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """The result of `run`, and the function that repeats its work.

        `run` reads nothing back. It may be called several times; its result holds nothing until it is repeated, and is
        overwritten by every repetition. Tensors that it reads keep their addresses.
        """

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to copy a tensor to the host, in the order of the device's work; the function returned waits for it."""

    def mark(self) -> Callable[[], None]:
        """Note what the device has been given to do; the function returned waits until it is done."""


class CudaGraphs:
    """Captures CUDA graphs. All share one memory pool, so no two may run at a time."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """See `Capture`; the caller's stream continues behind the capture. Raises RuntimeError if CUDA refuses."""
        with torch.cuda.device(self._device):
            caller = torch.cuda.current_stream()
            self._stream.wait_stream(caller)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    run()
            caller.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads of a server may use CUDA meanwhile. The outer `stream` restores the caller's
            # where a capture fails: `graph` does not.
            with (
                torch.cuda.stream(self._stream),
                torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
            ):
                out = run()
        return out, graph.replay

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        """See `Capture`; the copy is to pinned memory."""
        with torch.cuda.device(self._device):
            host = tensor.to("cpu", non_blocking=True)
        copied = self.mark()

        def wait() -> Tensor:
            copied()
            return host

        return wait

    def mark(self) -> Callable[[], None]:
        """See `Capture`."""
        with torch.cuda.device(self._device):
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        wait: Callable[[], None] = done.synchronize
        return wait
