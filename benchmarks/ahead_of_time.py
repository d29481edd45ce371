"""Compiles Triton kernels without a GPU, and reads the resource usage of the machine code.

One result an architecture: Triton names sm_90a, sm_100a, sm_120a, and such code runs nowhere else.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import ASTSource  # type: ignore[import-untyped]

#: A100, L4 and L40, H100 and H200, B200, RTX 50 and RTX PRO.
CAPABILITIES = (80, 89, 90, 100, 120)


@dataclass(frozen=True, slots=True)
class Bound:
    """The arguments with which Triton compiles a launch."""

    types: dict[str, Any]  # of run-time arguments; of a tuple those of its parts
    constants: dict[str, Any]
    warps: int


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
            found.append(Bound(types, given, compile["num_warps"]))
        return True

    driver, target = triton.runtime.driver, GPUTarget("cuda", capability, 32)
    active = driver._active
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = bound
        driver.set_active(
            SimpleNamespace(
                get_current_target=lambda: target,
                get_current_stream=lambda device: 0,
                get_current_device=lambda: f"ahead of time, {capability}",  # Triton keeps what it compiled by device
            )
        )
        try:
            run()
        finally:
            driver._active = active
    (one,) = found
    return one


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel for one architecture."""

    name: str  # of its entry point
    ptx: str
    cubin: bytes
    parameters: int  # of the entry point: Triton adds two pointers to scratch memory
    arguments: int  # of the kernel that are not compile-time constants
    shared: int  # bytes per block
    scratch: int  # bytes of the memory behind those two pointers
    registers: int  # per thread
    spilled: int  # bytes per thread, stores and loads


def compile_kernel(
    kernel: Any, types: dict[str, Any], constants: dict[str, Any], capability: int, warps: int
) -> Compiled:
    """Compile for one architecture, bypassing Triton's cache, since ptxas reports usage only when it runs.

    Args:
        kernel: a `triton.jit` function.
        types: its run-time arguments in order, such as {"q": "*bf16", "rows": "i32"}; of a tuple those of its parts,
            "constexpr" for None. All others of the kernel that are not constants are None. Pointers count as multiples
            of 16 bytes, as PyTorch and TensorRT give them.
        constants: its `constexpr` arguments.
        capability: 90 for 9.0.
        warps: of a block.
    """
    fixed = {name: None for name in kernel.arg_names if name not in types} | constants
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    parts: dict[tuple[int, ...], str] = {}
    for place, kind in enumerate(signature.values()):
        parts |= {(place, n): part for n, part in enumerate(kind)} if isinstance(kind, tuple) else {(place,): kind}
    fixed |= {place: None for place, kind in parts.items() if len(place) > 1 and kind == "constexpr"}
    aligned = {place: [["tt.divisibility", 16]] for place, kind in parts.items() if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=aligned)
    said = io.StringIO()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), redirect_stdout(said):
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True
        done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    ptx, meta = done.asm["ptx"], done.metadata
    entry = ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))]
    return Compiled(
        name=meta.name,
        ptx=ptx,
        cubin=done.asm["cubin"],
        parameters=entry.count(".param"),
        arguments=sum(kind != "constexpr" for kind in parts.values()),
        shared=meta.shared,
        scratch=meta.global_scratch_size + meta.profile_scratch_size,
        registers=_largest(r"Used (\d+) registers", said.getvalue()),
        spilled=_largest(r"(\d+) bytes spill", said.getvalue()),
    )


def _largest(pattern: str, log: str) -> int:
    """The largest number that ptxas reports; a report without any is an error, not 0."""
    found = [int(number) for number in re.findall(pattern, log)]
    assert found, f"ptxas reports no {pattern!r}:\n{log}"
    return max(found)
