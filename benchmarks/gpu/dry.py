"""Runs every case of the suite without a GPU, but for its launches: `sh benchmarks/gpu_suite.sh --dry`.

Tensors are on PyTorch's meta device, which has shapes, types and devices and no numbers: numbers that are read are 0,
comparisons true, so checks hold. Kernels of Triton are launched into nothing, times are NaN. Captured steps, whose
tokens decide what happens next, run on the CPU with recorded operators in place of graphs. Tests are only collected.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from benchmarks.gpu.cases import Case, Note
from benchmarks.gpu.evidence import LAUNCHES
from benchmarks.gpu.record import Row
from benchmarks.gpu.traffic import Meter, without_gpu
from d2sd.runtime.decode import Committed, StepResult
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.staging import Staging

T = TypeVar("T")
NO_TIME = float("nan")
#: Most seconds of a dry run, which takes two minutes of one core.
SECONDS = 3600
#: The device that the record names: its rows are never mixed with those of a GPU.
DEVICE = "none: a dry run"


def dry(cases: Iterable[Case]) -> Iterator[Case]:
    """The same cases, without a GPU."""
    for key, measure in cases:
        yield key, partial(_without_launches, measure)


def _without_launches(measure: Callable[..., dict[str, Any]], note: Note) -> dict[str, Any]:
    parameters = inspect.signature(measure).parameters
    if "collect" in parameters:
        return measure(note, collect=True)
    if "capture" in parameters:
        from tests.runtime.recorded_graphs import RecordedGraphs

        with patch("d2sd.plugins.cpu.library.available", lambda: False):  # its kernels hide their operators
            LAUNCHES.add()  # operators of a CPU, which has no kernels
            return measure(note, device="cpu", capture=lambda device: RecordedGraphs(), requests=2)
    if "device" not in parameters:
        return measure(note)
    with nothing_runs():
        return measure(note, device="meta")


def errors(rows: dict[str, Row]) -> list[str]:
    """Errors of peers, except for lack of a package or of memory: on a GPU their failures are figures."""
    reasons = [(key, *pair) for key, row in rows.items() for pair in row.get("reasons", {}).items()]
    return [f"{key}, {peer}: {reason}" for key, peer, reason in reasons if not reason.startswith("Skip")]


class Numbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stand-in numbers for whatever reads a measurement."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        on_meta = any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves((args, kwargs)))
        if name == "equal":
            return True
        if on_meta and str(func) == "aten._scaled_mm.out":  # the one operator of a model that meta tensors have not
            return kwargs["out"]
        if on_meta and name in ("item", "_local_scalar_dense"):
            return {torch.bool: True}.get(args[0].dtype, 0.0 if args[0].is_floating_point() else 0)
        if on_meta and name in ("_to_copy", "to") and str(kwargs.get("device")) == "cpu":
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)


def unpack(result: StepResult, host: Tensor) -> list[Committed]:
    """Every request commits the longest path, of token 0."""
    requests, longest = result.accepted.tokens.shape
    return [Committed(longest, 0, [0] * longest, []) for _ in range(requests)]


def staged(make: Callable[..., None]) -> Callable[..., None]:
    """`ModelRunner.__init__`, after which inputs of a prefill are copied to the meta device as to a GPU."""

    def init(runner: ModelRunner, *args: Any, **options: Any) -> None:
        make(runner, *args, **options)
        if runner.device == "meta":
            runner.staging = Staging(runner.device, lambda: lambda: None)

    return init


class OfCpu(torch.Generator):
    """The meta device has none of its own."""

    def __new__(cls, device: str = "cpu") -> Self:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


@contextmanager
def nothing_runs() -> Iterator[None]:
    """The meta device in place of a GPU."""
    no_gpu = Meter(0, ())

    def capture(device: str) -> Callable[[Callable[[], T]], tuple[T, Callable[[], None]]]:
        return lambda run: (run(), lambda: None)

    with ExitStack() as stack:
        stack.enter_context(without_gpu(no_gpu))
        for name, value in {
            "torch.Generator": OfCpu,
            "torch.cuda.synchronize": lambda *_: None,
            "torch.cuda.mem_get_info": lambda *_: (80 << 30, 80 << 30),
            "torch.cuda.memory_allocated": lambda *_: 1,
            "benchmarks.gpu.timing.once": lambda run: (run(), (NO_TIME, True))[1],
            "benchmarks.gpu.timing.ROUNDS": 2,
            "benchmarks.gpu.peers.flex_attention": lambda queries, *_, **__: queries,
            "benchmarks.gpu.call.BUDGET": defaultdict(lambda: math.inf),
            "d2sd.runtime.decode.StepResult.unpack": unpack,
            "benchmarks.gpu.steps.CudaGraphs": capture,
            "d2sd.runtime.model_runner.ModelRunner.__init__": staged(ModelRunner.__init__),
            "benchmarks.gpu.steps._seconds": lambda run: NO_TIME,
            "benchmarks.gpu.steps.in_a_row": lambda run: NO_TIME,
            "benchmarks.gpu.steps.kernels_of": lambda run: {},
            "benchmarks.gpu.traffic.Meter.kernel": LAUNCHES.add,
        }.items():
            stack.enter_context(patch(name, value))
        stack.enter_context(Numbers())  # type: ignore[no-untyped-call]
        yield
