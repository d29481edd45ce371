"""An H100 without numbers: operators and Triton kernels on fake CUDA tensors are counted instead of launched.

FakeTensorMode refuses operators that mix devices and everything that reads a value: `item`, `tolist`, `bool`, masks as
indices. `Watch` reports what it lets pass, copies between devices, and counts launches: operators that are no views,
and Triton kernels. Kernels inside an operator of PyTorch count as one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from d2sd.modeling import product
from d2sd.plugins import dispatch
from d2sd.runtime import model_runner
from d2sd.runtime.decode import Committed, StepResult
from tools.cuda.launches import launches

T = TypeVar("T")


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Launches by stage, and copies between host and device; `crossing` has those by name, or "waits" if the host does.

    Of numbers that the host passes by value `crossing` knows too, `copies` does not.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()
        self.copies: list[str] = []
        self.crossing: Counter[str] = Counter()
        self.current = "other"

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The timer of `decode_step`."""
        before, self.current = self.current, name
        yield
        self.current = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # The one operator of the step that has no fake form.
        out = kwargs["out"] if str(func) == "aten._scaled_mm.out" and kwargs else func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        devices = {x.device.type for x in (*given, *made)}
        if "cuda" in devices and launches(func, given, made):
            self.launches[self.current] += 1
        if len(devices) > 1:
            names = [argument.name for argument in func._schema.arguments]
            asked = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.crossing[func.overloadpacket.__name__ if asked.get("non_blocking") else "waits"] += 1
            if any(x.device.type == "cpu" and (x.dim() or x in made) for x in (*given, *made)):
                self.copies.append(f"{func} in {self.current}")
        return out


class Captures:
    """A `Capture` that runs the function once more under a watch, and replays nothing."""

    def __init__(self, device: str) -> None:
        self.watches: list[Watch] = []

    def __call__(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        run()
        self.watches.append(watch := Watch())
        with watch:
            out = run()
        return out, lambda: None

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        copy = tensor.to("cpu", non_blocking=True)
        return lambda: copy

    def mark(self) -> Callable[[], None]:
        return lambda: None


def unpack(result: StepResult, host: Tensor) -> list[Committed]:
    """Unpack as `StepResult.unpack` does, with counts and tokens that the fake tensors do not have."""
    batch, longest = result.accepted.tokens.shape
    counts = [random.randint(1, longest) for _ in range(batch)]
    return [Committed(count, 0, [random.randrange(400) for _ in range(count)], []) for count in counts]


@contextmanager
def fake_gpu(watch: Watch, capability: tuple[int, int] = (9, 0)) -> Iterator[FakeTensorMode]:
    """An H100 in all that the code asks PyTorch and Triton for; Triton kernels are counted instead of launched."""

    def launched(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        for value in (part for arg in args for part in (arg if isinstance(arg, tuple) else (arg,))):
            if isinstance(value, Tensor):
                assert value.device.type == "cuda", kernel.__name__
            else:
                assert value is None or isinstance(value, (int, float)), f"{kernel.__name__}: {type(value)}"
        assert all(isinstance(size, int) and size > 0 for size in grid), grid
        watch.launches[watch.current] += 1

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=False) as mode:
        _device_constructors()  # knows operators by identity: made before one is patched
        zeros = torch.zeros
        patch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))
        patch.setattr(torch, "frombuffer", lambda buffer, *, dtype: zeros(len(buffer) // dtype.itemsize, dtype=dtype))
        patch.setattr(model_runner, "CudaGraphs", lambda device: None)  # steps run one by one
        patch.setattr(dispatch, "use_kernels", lambda op, x, **_: x.device.type == "cuda")
        patch.setattr(product, "_equal", lambda scales: True)
        patch.setattr(JITFunction, "run", launched)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
        patch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
        yield mode
