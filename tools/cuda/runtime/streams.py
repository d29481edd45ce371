"""Streams and events, as `torch.cuda` has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tools.cuda.runtime.order import Actor, Fault

if TYPE_CHECKING:
    from tools.cuda.runtime.tensors import Cuda


class Stream:
    """`torch.cuda.Stream`."""

    cuda: Cuda  # set by the patches

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.actor = Actor(f"stream {len(self.cuda.streams)}")
        self.device, self.cuda_stream = torch.device("cuda:0"), len(self.cuda.streams)
        self.cuda.streams.append(self)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.cuda.wait(self.actor.clock)


class Event:
    """`torch.cuda.Event`; waiting for one that was not recorded is no wait, as in CUDA."""

    cuda: Cuda

    def __init__(self, *_: Any, **__: Any) -> None:
        self._clock: dict[Actor, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.cuda.stream
        self.cuda.refuse_in_capture("records an event", stream)
        stream.actor.join(self.cuda.host.clock)
        stream.actor.advance()
        self._clock = dict(stream.actor.clock)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or self.cuda.stream
        self.cuda.refuse_in_capture("waits for an event", stream)
        stream.actor.join(self._clock)

    def synchronize(self) -> None:
        self.cuda.wait(self._clock)

    def query(self) -> bool:
        """Always done by now; who asks has seen it."""
        self.cuda.host.join(self._clock)
        return True


class StreamContext:
    """`torch.cuda.stream`."""

    def __init__(self, cuda: Cuda, stream: Stream | None) -> None:
        self._cuda, self._stream, self._before = cuda, stream or cuda.stream, cuda.stream

    def __enter__(self) -> None:
        self._before, self._cuda.stream = self._cuda.stream, self._stream

    def __exit__(self, *_: object) -> None:
        self._cuda.stream = self._before


class NoDevice:
    """`torch.cuda.device`: there is one."""

    def __init__(self, device: object) -> None:
        if torch.device(str(device)).type != "cuda":
            raise Fault(f"torch.cuda.device({device})")

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
