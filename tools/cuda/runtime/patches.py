"""`torch.cuda` for the time of a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import torch

from tools.cuda.runtime.graphs import CUDAGraph
from tools.cuda.runtime.streams import Event, NoDevice, Stream, StreamContext
from tools.cuda.runtime.tensors import Cuda


@contextmanager
def cuda_on_cpu() -> Iterator[Cuda]:
    """Inside, `cuda:0` is the CPU. Raises the first Fault at the end, also one that somebody caught."""
    cuda, handles = Cuda(), count()

    def set_stream(stream: Stream) -> None:
        cuda.stream = stream

    def synchronize(device: object = None) -> None:
        # `torch.cuda.graph` waits for the device before a capture. Its documentation does not say so: nothing may
        # depend on it.
        if sys._getframe(1).f_globals["__name__"] != "torch.cuda.graphs":
            for stream in cuda.streams:
                cuda.wait(stream.actor.clock)

    def nothing(*_: object) -> None: ...

    Event.cuda = CUDAGraph.cuda = cuda
    of_cuda: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": lambda: (0, next(handles) + 1),
        "current_stream": lambda device=None: cuda.stream,
        "set_stream": set_stream,
        "stream": lambda stream: StreamContext(cuda, stream),
        "device": NoDevice,
        "current_device": lambda: 0,
        "synchronize": synchronize,
        "empty_cache": nothing,
        "_lazy_init": nothing,
        "is_current_stream_capturing": lambda: cuda.capturing is not None and cuda.capturing.stream is cuda.stream,
    }
    lifts = torch._C._only_lift_cpu_tensors()
    try:
        with patch.multiple(torch.cuda, **of_cuda), patch.object(torch._C, "_host_emptyCache", nothing, create=True):
            torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device="cuda")` copies where we see it
            with cuda:
                yield cuda
    except Exception as error:
        if cuda.faults and error is not cuda.faults[0]:
            raise cuda.faults[0] from error
        raise
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)
    if cuda.faults:
        raise cuda.faults[0]
