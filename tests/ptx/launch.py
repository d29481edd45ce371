"""Triton kernels launched on CPU tensors, compiled as for a GPU and executed as its PTX.

    with executed_as_ptx(90) as launches:
        cascade_attention_triton(q, k, v, context, mask_words)  # the product's own launcher
    launches[0].counts["bar.sync"]

Triton specialises a kernel by its arguments as it does on a GPU. ptxas is left out: nothing below PTX is looked at.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from tests.ptx.machine import Machine
from tests.ptx.memory import GlobalMemory, Placed
from tests.ptx.program import execute

#: Changes PTX before it runs: (name of the kernel, PTX) -> PTX.
Edit = Callable[[str, str], str]


@dataclass(frozen=True)
class Launch:
    """One kernel that ran to its end."""

    name: str
    ptx: str
    counts: Counter[str]  # instructions that ran, by opcode
    executed: int


def _without_ptxas(*arguments: Any) -> tuple[str, str] | None:
    """Triton's hook into its stages, and the key of what it changes."""
    if arguments:
        _, stages, *_ = arguments
        stages["cubin"] = lambda source, metadata: b""
    return "ptx", "ptx"


@contextmanager
def executed_as_ptx(capability: int, edit: Edit | None = None, limit: int = 3_000_000) -> Iterator[list[Launch]]:
    """Runs every Triton kernel launched inside, as PTX for this capability (90 for 9.0); lists the launches.

    Raises Fault for what a kernel must not do, Unsupported for instructions that are not modelled.
    """
    launches: list[Launch] = []
    original, active = JITFunction.run, triton.runtime.driver._active

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = original(kernel, *args, grid=grid, warmup=True, **options)
        if not warmup:
            given = dict(zip(kernel.arg_names, args, strict=False)) | options
            kinds = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
            ptx = edit(kernel.__name__, compiled.asm["ptx"]) if edit else compiled.asm["ptx"]
            shape = grid(given) if callable(grid) else tuple(grid)
            values = [given[name] for name in kinds]
            machine = _launch(ptx, shape, list(kinds), values, _written(kernel), compiled.metadata.shared, limit)
            launches.append(Launch(kernel.__name__, ptx, machine.counts, machine.executed))
        return compiled

    target = GPUTarget("cuda", capability, 32)
    fake = SimpleNamespace(
        get_current_target=lambda: target, get_current_stream=lambda device: 0,
        get_current_device=lambda: capability,  # Triton keeps what it compiled by device
    )  # fmt: skip
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.add_stages_inspection_hook = _without_ptxas
        JITFunction.run = run
        triton.runtime.driver.set_active(fake)
        try:
            yield launches
        finally:
            JITFunction.run, triton.runtime.driver._active = original, active


def _written(kernel: Any) -> set[str]:
    """Arguments that a kernel stores to, by its source; all others are read-only."""
    found: set[str] = set()
    calls = (node for node in ast.walk(kernel.parse()) if isinstance(node, ast.Call))
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name == "store" or name.startswith("atomic_"):
            found |= {part.id for part in ast.walk(call.args[0]) if isinstance(part, ast.Name)}
    return found & set(kernel.arg_names)


def _launch(
    ptx: str, grid: tuple[int, ...], names: list[str], values: list[Any], written: set[str], shared: int, limit: int
) -> Machine:
    tensors = {name: value for name, value in zip(names, values, strict=True) if isinstance(value, Tensor)}
    placed = [
        Placed(name, span(tensor).copy(), name in written, tensor.data_ptr() % 256) for name, tensor in tensors.items()
    ]
    memory = GlobalMemory(placed)
    order = {name: number for number, name in enumerate(tensors)}
    arguments = [memory.address(order[n]) if n in order else int(v) for n, v in zip(names, values, strict=True)]
    machine = execute(ptx, grid, [*arguments, 0, 0], memory, shared, limit)  # the two: scratch memory, never touched
    for name in written & set(tensors):
        span(tensors[name])[:] = memory.data(order[name])
    return machine


def span(tensor: Tensor) -> Any:
    """The bytes from a tensor's first element to its last, as a NumPy array of the same memory."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.element_size()
    found: np.ndarray[Any, Any] = whole.numpy()[start : start + (last + 1) * tensor.element_size()]
    return found
