"""Capture and replay, as `torch.cuda.CUDAGraph` has them, and the memory of graphs.

Nothing runs in a capture: its tensors have shapes, which operators find on zeros, and hold garbage. A replay is one
access of its stream to all that the graph reads and writes, to its results, and to its pool, because graphs of one
pool share memory: no two may run at a time. What the graph made and nobody refers to is overwritten behind every
replay, as the next graph of the pool may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tools.cuda.runtime.order import Memory
from tools.cuda.runtime.streams import Stream
from tools.cuda.runtime.tensors import Cuda, Held, changed_by, mapped, storage_of, tensors_in


class CUDAGraph:
    """`torch.cuda.CUDAGraph`."""

    cuda: Cuda  # set by the patches

    def __init__(self, keep_graph: bool = False) -> None:
        self.stream: Stream | None = None
        self._pool: Memory | None = None
        self._operators: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        #: Memory that was there before, by whether it is written.
        self._used: dict[bool, dict[int, ref[Memory]]] = {False: {}, True: {}}
        self._own: list[tuple[ref[Memory], Tensor]] = []

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global", **_: Any) -> None:
        cuda = self.cuda
        if cuda.capturing is not None:
            cuda.fault("a capture inside a capture")
        if cuda.stream is cuda.streams[0]:
            cuda.fault("a capture on the default stream, which CUDA refuses")
        self._pool = cuda.pools.setdefault(pool or (id(self), 0), Memory("the pool of graphs", "device"))
        self.stream, cuda.capturing = cuda.stream, self

    def capture_end(self) -> None:
        self.cuda.capturing = None

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], held: list[Held]) -> Any:
        """Write down an operator over the device's own tensors; returns what it will make, without numbers."""
        written = changed_by(func, args, kwargs)
        if written:
            self._operators.append((func, args, kwargs, []))
            for x in held:
                self._uses(x.memory, any(x.value is t for t in written))
            returned = [x for t in written for x in held if x.value is t]
            return returned[0] if len(func._schema.returns) == 1 else tuple(returned)
        placeholders: dict[int, Tensor] = {}

        def like(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            made = torch.full((last + 1,), fill, dtype=x.dtype).as_strided(x.shape, x.stride())
            placeholders[storage_of(made)] = made
            return made

        try:
            fill = 0  # an index into whatever it is
            shapes = func(*mapped(like, args), **{name: mapped(like, x) for name, x in kwargs.items()})
        except RuntimeError:  # a division
            fill = 1
            shapes = func(*mapped(like, args), **{name: mapped(like, x) for name, x in kwargs.items()})
        found = tensors_in(shapes)
        if found and all(storage_of(t) in placeholders for t in found):  # views
            of = {storage_of(x.value): x.memory for x in held}
            views = func(*args, **kwargs)
            return mapped(lambda t: Held(self.cuda, t, of[storage_of(t)]) if isinstance(t, Tensor) else t, views)
        for x in held:
            self._uses(x.memory, False)
        outputs: list[Tensor] = []

        def allocated(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            outputs.append(inner := torch.empty_strided(t.shape, t.stride(), dtype=t.dtype))
            memory = self.cuda.new("device", inner)
            memory.name, memory.home, memory.owner = f"{memory.name} of a graph", None, ref(self)
            self._own.append((ref(memory), inner))
            _fill_with_garbage(inner)
            return Held(self.cuda, inner, memory)

        made = mapped(allocated, shapes)
        self._operators.append((func, args, kwargs, outputs))
        return made

    def replay(self) -> None:
        cuda = self.cuda
        cuda.refuse_in_capture("a replay", cuda.stream)
        cuda.replays += 1
        with cuda.noted(), torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.no_grad():
            actor = cuda.begin(on_device=True)
            for writes, memories in self._used.items():
                for of in memories.values():
                    memory = of()
                    if memory is None:
                        cuda.fault("a graph uses memory that was freed")
                    elif writes:
                        memory.writes(actor)
                    else:
                        memory.reads(actor)
            assert self._pool is not None, "nothing was captured"
            self._pool.writes(actor)
            for own, _ in self._own:
                if (memory := own()) is not None:
                    memory.writes(actor)
            for func, args, kwargs, outputs in self._operators:
                values = func(*args, **kwargs)
                for to, value in zip(outputs, tensors_in(values), strict=bool(outputs)):
                    to.copy_(value)
            for own, inner in self._own:
                if own() is None:
                    _fill_with_garbage(inner)

    def _uses(self, memory: Memory, writes: bool) -> None:
        if memory.owner is None or memory.owner() is not self:
            self._used[writes].setdefault(id(memory), ref(memory))


def _fill_with_garbage(tensor: Tensor) -> None:
    """NaN; for integers the largest one, out of range as an index."""
    dtype = tensor.dtype
    tensor.fill_(torch.nan if dtype.is_floating_point else 1 if dtype == torch.bool else torch.iinfo(dtype).max)
