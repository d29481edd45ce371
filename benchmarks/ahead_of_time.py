"""Compiles Triton kernels without a GPU exactly as they are served, and reads the resource usage of the machine code.

A launcher's own call is compiled by Triton's launch itself, for a GPU that is not there: specialised by the arguments
(integers that are 1 or multiples of 16, aligned pointers), with the launch's options, through Triton's cache.
One result an architecture: Triton names sm_90a, sm_100a, sm_120a, and such code runs nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from benchmarks.sass import resources

#: A100, L4 and L40, H100 and H200, B200, RTX 50 and RTX PRO.
CAPABILITIES = (80, 89, 90, 100, 120)


@dataclass(frozen=True, slots=True)
class Bound:
    """The arguments with which Triton compiles a launch."""

    types: dict[str, Any]  # of run-time arguments; of a tuple those of its parts
    constants: dict[str, Any]
    warps: int
    key: str  # Triton's own, of all that specialises the code


def bind(kernel: Any, run: Callable[[], object], capability: int) -> Bound:
    """Reads what the launchers that `run` calls hand to a kernel; they may be given tensors on the meta device.

    Triton binds the arguments as for this architecture, and is stopped before it compiles: nothing is launched.
    """
    found: list[Bound] = []

    def bound(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if fn.jit_function is kernel:
            types = {name: kind for name, kind in compile["signature"].items() if kind != "constexpr"}
            whole = ((*place, value) for place, value in compile["constants"].items() if len(place) == 1)  # of no tuple
            given = {kernel.arg_names[place]: value for place, value in whole if value is not None}
            found.append(Bound(types, given, compile["num_warps"], compile["key"]))
        return True

    with triton.knobs.runtime.scope(), pretended(capability, "bound"):
        triton.knobs.runtime.jit_cache_hook = bound
        run()
    (one,) = found
    return one


@contextmanager
def pretended(capability: int, purpose: str) -> Iterator[None]:
    """A GPU of this capability is Triton's current device; nothing can be launched on it.

    Triton keeps what it compiled by device, and asks no hook again: each purpose has a device of its own.
    """
    driver, target = triton.runtime.driver, GPUTarget("cuda", capability, 32)
    active = driver._active
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_stream=lambda device: 0,
            get_current_device=lambda: f"{purpose}, {capability}",
        )
    )
    try:
        yield
    finally:
        driver._active = active


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel for one architecture."""

    name: str  # of its entry point
    ptx: str
    cubin: bytes
    names: tuple[str, ...]  # of its arguments that are not compile-time constants, tuples by part
    warps: int  # of a block
    parameters: int  # of the entry point: Triton adds two pointers to scratch memory
    shared: int  # bytes per block
    scratch: int  # bytes of the memory behind those two pointers
    registers: int  # per thread
    dependent: bool  # launched while the kernel before still runs
    spilled: int  # bytes per thread of local memory, without the arrays that the kernel declares


def compile_kernel(kernel: Any, run: Callable[[], object], capability: int) -> Compiled:
    """Compile the launch of `kernel` that `run` makes, with tensors on the meta device, for one architecture.

    Args:
        kernel: a `triton.jit` function.
        run: calls its launcher; other kernels that it launches are left out.
        capability: 90 for 9.0.
    """
    found: list[Any] = []
    launch = JITFunction.run

    def compiled(launched: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if launched is kernel:
            found.append(launch(launched, *given, grid=grid, warmup=True, **options))

    with patch.object(JITFunction, "run", compiled), pretended(capability, "compiled"):
        run()
    if not found[0].asm["cubin"]:  # who compiled to PTX alone left it in Triton's cache
        found.clear()
        with patch.object(JITFunction, "run", compiled), triton.knobs.compilation.scope():
            triton.knobs.compilation.always_compile = True
            with pretended(capability, "compiled again"):
                run()
    (done,) = found
    ptx, meta, used = done.asm["ptx"], done.metadata, resources(done.asm["cubin"])
    entry = ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))]
    declared = sum(int(size) for size in re.findall(r"\.local .*__local_depot\d+\[(\d+)\]", ptx))
    return Compiled(
        name=meta.name,
        ptx=ptx,
        cubin=done.asm["cubin"],
        names=tuple(_names(done.src.signature)),
        warps=meta.num_warps,
        parameters=entry.count(".param"),
        shared=meta.shared,
        scratch=meta.global_scratch_size + meta.profile_scratch_size,
        registers=used["REG"],
        dependent=meta.launch_pdl,
        spilled=max(0, used["STACK"] - -(-declared // 8) * 8),  # a stack is of multiples of eight bytes
    )


def _names(signature: dict[str, Any]) -> Iterator[str]:
    for name, kind in signature.items():
        parts = {f"{name}[{n}]": part for n, part in enumerate(kind)} if isinstance(kind, tuple) else {name: kind}
        yield from (part for part, one in parts.items() if one != "constexpr")
