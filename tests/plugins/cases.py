"""Every kernel, registered once: in `cases.py` of its op's folder here, which all proofs read.

Benchmarks compile the launches ahead of time and count bytes by the rest; tests hold that no kernel is missing and that
what is written here is what its source stores. Neither pytest nor a GPU is needed to import it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from d2sd.plugins import dispatch

KV_HEADS, GROUP, PAGE = 8, 4, 16  # Qwen3-8B's and Llama-3.1-8B's; they change addresses, not tiles
TYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "i64": torch.long,
    "i32": torch.int32,
    "u1": torch.bool,
}
#: From arguments by name, and tokens of context: bytes of those of which a kernel touches a part, and the operations of
#: its products.
Touched = Callable[[dict[str, Any], int], tuple[dict[str, int], int]]


@dataclass(frozen=True)
class Kernel:
    """A kernel, with all that the proofs must know of it."""

    kernel: Any
    #: Arguments that it writes. It reads the others, and of its own results those of `reads_back`.
    writes: tuple[str, ...]
    #: Launches to compile ahead of time, calls of the product's launcher on the meta device, by name. It contains "fp8"
    #: where the launch needs compute capability 8.9.
    launches: Mapping[str, Callable[[], object]]
    reads_back: tuple[str, ...] = ()
    #: Arguments of more than a megabyte that a step reads from memory: weights, K/V pages and logits. The others were
    #: written by the launches before, and come from the L2 cache.
    streamed: tuple[str, ...] = ()
    touched: Touched = field(default=lambda values, context: ({}, 0))


class Check(NamedTuple):
    """A small case of a test in tests/plugins/kernels/, executed as PTX at every change."""

    #: All that it launches, without `_kernel`.
    kernels: str
    #: Module and function, "layers.test_norm".
    test: str
    #: Of the test. A string is what the module calls so.
    arguments: tuple[Any, ...] = ()
    #: Whether warps meet in memory: then each barrier is needed, so loops take several turns.
    barriers: bool = True

    @property
    def module(self) -> ModuleType:
        return import_module(f"tests.plugins.kernels.{self.test.split('.')[0]}")

    def run(self, **fixtures: Any) -> None:
        """Run the test, with those of the fixtures that it asks for."""
        test = getattr(self.module, self.test.split(".")[1])
        asked = {name: value for name, value in fixtures.items() if name in inspect.signature(test).parameters}
        test(*(getattr(self.module, x) if isinstance(x, str) else x for x in self.arguments), **asked)


def some(kind: str, *shape: int) -> Tensor:
    """A tensor of this type on the meta device; without a shape a number."""
    return torch.empty(shape, dtype=TYPES[kind], device="meta")


def implementations(folder: str, which: str) -> Any:
    """All ops of a folder by their names: "reference", "triton" or "cpu"."""
    import_module(f"d2sd.plugins.{folder}")
    return SimpleNamespace(**{op.name: getattr(op, which) for op in dispatch.OPS.values() if op.folder == folder})


@cache
def _ops() -> list[ModuleType]:
    names = sorted(path.parent.name for path in Path(__file__).parent.glob("*/cases.py"))
    return [import_module(f"tests.plugins.{name}.cases") for name in names]


@cache
def kernels() -> dict[str, Kernel]:
    """All of them, by name."""
    return {kernel.kernel.__name__: kernel for op in _ops() for kernel in op.KERNELS}


@cache
def checks() -> dict[str, Check]:
    """Small cases of the tests, by name. Attention and exact mode have their own in tests/ptx/."""
    return {name: check for op in _ops() for name, check in getattr(op, "CHECKS", {}).items()}
