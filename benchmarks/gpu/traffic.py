"""Bytes that each launch of a step reads and writes, and operations of its products, by shapes on meta tensors.

    meter = Meter(context=2048, vocabularies=(151936,))
    with without_gpu(meter), meter:
        ...                          # decode steps of models on torch.device("meta")

A launch is a Triton kernel, or an operator of PyTorch other than a view. It reads each byte once, however many of its
programs do: the others find it in the L2 cache. What a kernel reads and writes of its arguments is in its op's
tests/plugins/OP/cases.py; a kernel that is in none is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from d2sd.modeling import fp8, product
from d2sd.plugins import dispatch
from tests.plugins.cases import kernels
from tools.cuda.launches import launches, storage_of

#: Multiprocessors, by which attention splits its context. B200's 148 give the same splits for all that is counted here.
PROCESSORS = 132
WEIGHTS, KV, STATES, LOGITS, ACTIVATIONS = "weights", "K/V", "states", "logits", "activations"


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes of one tensor that one launch reads or writes."""

    role: str
    storage: int
    size: int  # bytes of the storage
    bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One node of a step's CUDA graph."""

    stage: str  # of `decode_step`
    name: str
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    flops: int = 0  # of matrix products, two for every multiplication and addition
    fp8: bool = False  # their type

    @property
    def bytes(self) -> int:
        return sum(access.bytes for access in (*self.reads, *self.writes))


def read(launches: list[Launch], role: str | None = None) -> int:
    """Bytes read; `role`: of these tensors."""
    return sum(access.bytes for launch in launches for access in launch.reads if role in (None, access.role))


def written(launches: list[Launch], role: str | None = None) -> int:
    """Bytes written; `role`: of these tensors."""
    return sum(access.bytes for launch in launches for access in launch.writes if role in (None, access.role))


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the launches of what runs inside. Tensors that were there before, and are not `known`, are weights."""

    def __init__(self, context: int, vocabularies: tuple[int, ...]) -> None:
        """`context`: committed tokens of every request; `vocabularies`: last axes of logits."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
        self._context, self._vocabularies = context, vocabularies
        self._roles: dict[int, str] = {}
        self._stage = "other"

    def known(self, role: str, *tensors: Tensor) -> None:
        """Note that these tensors are K/V pages, states, or inputs of the step."""
        self._roles.update({storage_of(tensor): role for tensor in tensors})

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The timer of `decode_step`."""
        before, self._stage = self._stage, name
        yield
        self._stage = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        no_meta_kernel = str(func) == "aten._scaled_mm.out"
        out = kwargs["out"] if no_meta_kernel else func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        storages = {storage_of(x) for x in given}
        for tensor in made:
            if storage_of(tensor) not in storages:
                self.known(LOGITS if tensor.dim() and tensor.shape[-1] in self._vocabularies else ACTIVATIONS, tensor)
        if launches(func, given, made):
            reads, writes = operator_bytes(func, args, kwargs, made)
            name = str(func).removesuffix(".default")
            self._record(name, reads, writes, product_flops(func, args, out), name.startswith("aten._scaled_mm"))
        return out

    def kernel(self, kernel: Any, *args: Any, **options: Any) -> None:
        """In place of a Triton kernel's launch."""
        names = [name for name in kernel.arg_names if name not in options]
        values = dict(zip(names, args, strict=True)) | options
        reads, writes, flops = kernel_bytes(kernel.__name__, values, self._context)
        self._record(kernel.__name__, reads, writes, flops, fp8=False)

    def _record(self, name: str, reads: Bytes, writes: Bytes, flops: int, fp8: bool) -> None:
        read, written = (
            tuple(
                Access(self._roles.get(storage_of(x), WEIGHTS), storage_of(x), x.untyped_storage().nbytes(), count)
                for x, count in part
                if count
            )
            for part in (reads, writes)
        )
        self.launches.append(Launch(self._stage, name, read, written, flops=flops, fp8=fp8))


#: Tensors, each with the bytes of it that are touched.
Bytes = list[tuple[Tensor, int]]


def whole(tensor: Tensor) -> int:
    """Bytes of a tensor, those of broadcast axes once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count


def operator_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> tuple[Bytes, Bytes]:
    """Bytes that an operator of PyTorch reads and writes: its arguments and results, or the picked rows of a table."""
    name = func._schema.name.removeprefix("aten::")
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if name in ("index", "gather", "index_select", "embedding"):
        table, *others = given
        return [(table, whole(made[0])), *((x, whole(x)) for x in others)], [(made[0], whole(made[0]))]
    if name == "index_put_":
        target, indices, values = args[0], args[1], args[2]
        shape = torch.broadcast_shapes(*(x.shape for x in indices))  # type: ignore[no-untyped-call]
        picked = math.prod(shape) * args[0].element_size()
        return [(x, whole(x)) for x in (*indices, values)], [(target, picked)]
    if func._schema.is_mutable:
        written = [kwargs["out"]] if kwargs.get("out") is not None else [args[0]]
        only_writes = "out" in kwargs or name in ("copy_", "fill_", "zero_")
        read = [x for x in given if not only_writes or all(x is not other for other in written)]
        return [(x, whole(x)) for x in read], [(x, whole(x)) for x in written]
    return [(x, whole(x)) for x in given], [(x, whole(x)) for x in made]


def product_flops(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Operations of a matrix product; 0 for other operators."""
    name = func._schema.name.removeprefix("aten::")
    inner = {"linear": 0, "mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "baddbmm": 1}.get(name)
    return 0 if inner is None else 2 * out.numel() * args[inner].shape[-1]


def kernel_bytes(name: str, values: dict[str, Any], context: int) -> tuple[Bytes, Bytes, int]:
    """Bytes that a Triton kernel reads and writes, and its products' operations; `values` are its arguments by name."""
    if name not in kernels():
        raise KeyError(f"{name}: no tests/plugins/OP/cases.py says which arguments this kernel writes")
    rule = kernels()[name]
    part, flops = rule.touched(values, context)
    given = ((key, x) for key, value in values.items() for x in (value if isinstance(value, tuple) else (value,)))
    sized = [(key, (x, part.get(key, whole(x)))) for key, x in given if isinstance(x, Tensor)]
    reads = [pair for key, pair in sized if key not in rule.writes]
    reads += [pair for key, pair in sized if key in rule.reads_back]
    return reads, [pair for key, pair in sized if key in rule.writes], flops


@contextmanager
def without_gpu(meter: Meter) -> Iterator[None]:
    """Models on the meta device take the path of a GPU, and launches of Triton kernels go to the meter."""

    def launched(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        meter.kernel(kernel, *args, **options)

    with ExitStack() as stack:
        for name in ("use_kernels", "use_fused_layers"):
            stack.enter_context(patch.object(dispatch, name, lambda *_, **__: True))
        for owner, name, value in (
            (fp8, "use_fp8_gemm", lambda _: True),
            (product, "_equal", lambda _: True),
            (JITFunction, "run", launched),
            # the capability too: where there is a GPU, PyTorch asks for it while models are made
            (
                torch.cuda,
                "get_device_properties",
                lambda _: SimpleNamespace(multi_processor_count=PROCESSORS, major=9, minor=0),
            ),
            (torch.cuda, "device_of", lambda _: nullcontext()),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield
