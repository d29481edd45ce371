"""Tensors on `cuda:0` and in pinned memory, with numbers that a CPU computes, and who accesses them when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tools.cuda.runtime.order import Actor, Fault, Memory
from tools.cuda.runtime.streams import Stream

if TYPE_CHECKING:
    from tools.cuda.runtime.graphs import CUDAGraph

aten = torch.ops.aten
#: Made of operators that are told apart here.
_COMPOSITE = ("aten::to.", "aten::item", "aten::pin_memory", "aten::cpu", "aten::cuda")
#: Operators whose result is a number, or has a shape that depends on numbers: the host waits for the stream.
_WAITS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_dim.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
_CPU, _CUDA = torch.device("cpu"), torch.device("cuda:0")


class Held(Tensor):
    """A tensor in memory that is watched: of the device, or pinned on the host."""

    runtime: Cuda
    value: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls: type[Held], cuda: Cuda, inner: Tensor, memory: Memory) -> Held:
        made: Held = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=_CUDA if memory.kind == "device" else _CPU,
        )
        made.runtime, made.value, made.memory = cuda, inner, memory
        return made

    def __init__(self, *_: object) -> None: ...

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        held = next(x for x in tensors_in(args, kwargs or {}) if isinstance(x, Held))
        return held.runtime.run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.memory.name}, {self.value}"

    def tolist(self) -> Any:
        return self.runtime.to_host(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if self.memory.kind == "device":
            raise TypeError("a tensor on cuda:0 is no NumPy array")
        return self.runtime.to_host(self).numpy()

    def is_pinned(self, device: object = None) -> bool:
        return self.memory.kind == "pinned"

    def record_stream(self, stream: Any) -> None:
        self.memory.recorded.add(stream.actor)


class Cuda(TorchDispatchMode):
    """One device and its host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.host = Actor("the host")
        self.streams: list[Stream] = []
        self.capturing: CUDAGraph | None = None
        self.faults: list[Fault] = []
        self.pools: dict[tuple[int, int], Memory] = {}
        self.replays = self.operators = self.waits = 0
        #: The memory of a storage, while anything refers to it.
        self._memories: WeakValueDictionary[int, Memory] = WeakValueDictionary()
        Stream.cuda = self
        self.stream = Stream()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch asks; it would import its compiler, which takes seconds, to keep it from compiling operators."""
        return False

    # -- what tests call -----------------------------------------------------------------------------------------------

    def upload(self, tensor: Tensor) -> Tensor:
        """A copy on the device."""
        return self._copied(tensor, "device", non_blocking=False)

    def move(self, model: nn.Module) -> None:
        """All parameters and buffers to the device, in place; one that several modules share stays shared."""
        moved: dict[int, Any] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not isinstance(parameter, Held):
                    key = id(parameter)
                    made = moved.get(key)
                    if made is None:
                        made = nn.Parameter(self.upload(parameter.data), requires_grad=False)
                    module._parameters[name] = moved[key] = made
            for name, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, Held):
                    module._buffers[name] = self.upload(buffer)
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and not isinstance(value, Held):
                    setattr(module, name, self.upload(value))

    # -- time ----------------------------------------------------------------------------------------------------------

    def wait(self, clock: dict[Actor, int]) -> None:
        """The host waits."""
        self.refuse_in_capture("makes the host wait", self.stream)
        self.waits += 1
        self.host.join(clock)

    def refuse_in_capture(self, what: str, stream: Stream) -> None:
        if self.capturing is not None and stream is self.capturing.stream:
            self.fault(f"{what} in a capture")

    def fault(self, message: str) -> None:
        fault = Fault(message)
        self.faults.append(fault)
        raise fault

    def begin(self, on_device: bool) -> Actor:
        """Name who does the next operator."""
        self.host.advance()
        if not on_device:
            return self.host
        actor = self.stream.actor
        actor.join(self.host.clock)
        actor.advance()
        return actor

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Faults that a caller may catch are kept for the end."""
        try:
            yield
        except Fault as fault:
            if fault not in self.faults:
                self.faults.append(fault)
            raise

    # -- operators -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tensors_in(args, kwargs)
        held = [x for x in given if isinstance(x, Held)]
        device = kwargs.get("device")
        wanted = None if device is None else torch.device(device).type
        pinned = bool(kwargs.get("pin_memory"))
        if not held and wanted != "cuda" and not pinned and func is not aten._pin_memory.default:
            return func(*args, **kwargs)
        if func.name().startswith(_COMPOSITE):
            with self:
                return func.decompose(*args, **kwargs)
        with self.noted(), torch.inference_mode(False), torch.no_grad():
            if func is aten._to_copy.default:
                return self._to_copy(*args, **kwargs)
            if func is aten._pin_memory.default:
                return self._copied(args[0], "pinned", non_blocking=False)
            if func is aten.is_pinned.default:
                return args[0].memory.kind == "pinned"
            if func is aten.copy_.default and _place(args[0]) != _place(args[1]):
                return self._copy_into(*args, **kwargs)
            return self._compute(func, args, kwargs)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator of the host or of the device."""
        given = tensors_in(args, kwargs)
        held = [x for x in given if isinstance(x, Held)]
        device = kwargs.get("device")
        on_device = any(x.memory.kind == "device" for x in held) or (
            device is not None and torch.device(device).type == "cuda"
        )
        kind = "device" if on_device else "pinned" if kwargs.get("pin_memory") else "host"
        if on_device and any(_place(x) != "device" and x.dim() for x in given):
            raise RuntimeError(f"{func}: tensors on the host and on the device")
        graph = self.capturing if on_device and self.capturing and self.stream is self.capturing.stream else None

        def opened(x: Any) -> Any:
            if isinstance(x, Held):
                return x.value
            return x.clone() if isinstance(x, Tensor) and graph is not None else x  # a number, passed by value

        waits = func in _WAITS or (func is aten.index.Tensor and any(i is not None and _is_mask(i) for i in args[1]))
        args, kwargs = mapped(opened, args), {name: mapped(opened, value) for name, value in kwargs.items()}
        if device is not None:
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        if graph is not None:
            if waits:
                self.fault(f"{func} waits for the device in a capture")
            return graph.record(func, args, kwargs, held)
        actor = self.begin(on_device)
        self.operators += 1
        changed = changed_by(func, args, kwargs)
        out = func(*args, **kwargs)
        results = tensors_in(out)
        own = {storage_of(x.value) for x in held}
        if not (results and not changed and all(storage_of(t) in own for t in results)):  # else a view
            for x in held:
                if any(x.value is t for t in changed):
                    x.memory.writes(actor)
                elif not any(storage_of(x.value) == storage_of(t) for t in changed):
                    x.memory.reads(actor)
        if waits and on_device:
            self.wait(self.stream.actor.clock)
        by_inner = {id(x.value): x for x in held}

        def wrapped(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            if id(t) in by_inner:
                return by_inner[id(t)]
            memory = self._memories.get(storage_of(t)) if storage_of(t) in own else None
            if memory is None:
                if kind == "host":
                    return t
                memory = self.new(kind, t)
                if "empty" not in func.name():
                    memory.writes(actor)
            return Held(self, t, memory)

        return mapped(wrapped, out)

    def new(self, kind: str, inner: Tensor, home: Actor | None = None) -> Memory:
        """The memory of a new tensor."""
        home = home or (self.stream.actor if kind == "device" else None)
        name = f"{kind} memory {[*inner.shape]} {inner.dtype}".replace("torch.", "")
        made = Memory(name, kind, home, self.faults_at_the_end)
        self._memories[storage_of(inner)] = made
        return made

    def faults_at_the_end(self, message: str) -> None:
        self.faults.append(Fault(message))

    # -- copies between host and device --------------------------------------------------------------------------------

    def to_host(self, tensor: Held) -> Tensor:
        """Numbers that the host reads, after a wait where they are the device's."""
        with self.noted():
            on_device = tensor.memory.kind == "device"
            if on_device:
                self.refuse_in_capture("reads back", self.stream)
            tensor.memory.reads(self.begin(on_device))
            if on_device:
                self.wait(self.stream.actor.clock)
            return tensor.value.detach()

    def _to_copy(
        self, tensor: Tensor, *, device: Any = None, dtype: Any = None, non_blocking: bool = False, **options: Any
    ) -> Tensor:
        before = _place(tensor)
        after = before if device is None else "device" if torch.device(device).type == "cuda" else "host"
        after = "host" if after == "pinned" else after
        inner = tensor.value if isinstance(tensor, Held) else tensor
        if "device" not in (before, after) or before == after:  # a conversion of types
            options = {name: value for name, value in options.items() if name not in ("pin_memory", "layout")}
            of = {"dtype": dtype or tensor.dtype, **options}
            return self._compute(aten._to_copy.default, (tensor,), of)  # type: ignore[no-any-return]
        converted = inner if dtype is None else inner.to(dtype)
        if after == "device":
            return self._copied(tensor, "device", non_blocking=non_blocking, converted=converted)
        return self._copied(
            tensor, "pinned" if non_blocking else "host", non_blocking=non_blocking, converted=converted
        )

    def _copied(self, tensor: Tensor, kind: str, *, non_blocking: bool, converted: Tensor | None = None) -> Tensor:
        """A copy elsewhere, as `_to_copy` and `pin_memory` make it."""
        inner = tensor.value if isinstance(tensor, Held) else tensor
        value = (inner if converted is None else converted).clone(memory_format=torch.preserve_format)
        if kind == "pinned" and _place(tensor) != "device":
            pinned = self.new("pinned", value)
            pinned.writes(self.begin(False))
            return Held(self, value, pinned)
        self.refuse_in_capture("copies between host and device", self.stream)
        memory = None if kind == "host" else self.new(kind, value)
        self._transfer(tensor, memory, non_blocking)
        return value if memory is None else Held(self, value, memory)

    def _copy_into(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        to_inner, inner = (x.value if isinstance(x, Held) else x for x in (to, source))
        if "device" not in (_place(to), _place(source)):
            actor = self.begin(False)
            for tensor, access in ((source, "reads"), (to, "writes")):
                if isinstance(tensor, Held):
                    getattr(tensor.memory, access)(actor)
        else:
            self.refuse_in_capture("copies between host and device", self.stream)
            self._transfer(source, to.memory if isinstance(to, Held) else None, non_blocking)
        to_inner.copy_(inner)
        return to

    def _transfer(self, source: Tensor, to: Memory | None, non_blocking: bool) -> None:
        """Between host and device, on the current stream. The host waits unless told not to."""
        pageable = not isinstance(source, Held) or to is None
        if non_blocking and pageable:
            self.fault("a copy that does not wait, with host memory that is not pinned")
        actor = self.begin(True)
        if isinstance(source, Held):
            source.memory.reads(actor)
        if to is not None:
            to.writes(actor)
        if not non_blocking:
            self.wait(actor.clock)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of a value, or of all in a list or tuple, as operators take and give them."""
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(function, part) for part in value)
    return function(value)


def tensors_in(*values: Any) -> list[Tensor]:
    """All tensors in lists, tuples and dicts."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def _is_mask(index: Tensor) -> bool:
    """Whether the index is a mask, which PyTorch turns into numbers by `nonzero`."""
    return index.dtype in (torch.bool, torch.uint8)


def _place(tensor: Tensor) -> str:
    return tensor.memory.kind if isinstance(tensor, Held) else "host"


def storage_of(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


@cache
def _written_arguments(func: Any) -> tuple[list[int], list[str]]:
    """Positions and names of what an operator writes."""
    arguments = func._schema.arguments
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
    return [n for n, one in enumerate(written) if one], [
        argument.name for argument, one in zip(arguments, written, strict=True) if one
    ]


def changed_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    positions, names = _written_arguments(func)
    found = [args[n] for n in positions if n < len(args)] + [kwargs[name] for name in names if name in kwargs]
    return tensors_in(found)
