"""Programmatic dependent launch: a kernel's blocks start while the kernel before it still runs.

A launch with CUDA's attribute for it (`launch_pdl`) may begin as soon as every block of the kernel before has asked for
that (`griddepcontrol.launch_dependents`) or has ended. What it may not do yet is touch memory: `griddepcontrol.wait`
returns when all kernels before have ended and what they wrote is visible. So every kernel of d2sd begins with
`wait_for_prior_kernels()`, which does both, in this order:

- Behind the wait are all reads, because the kernel before may write there, and all writes, because it may read there.
- Every thread waits, whatever it does then. A kernel that ends without has ended before those before it, and the next
  kernel's wait, which is for this one, would not cover them.
- The next kernel is let in behind the wait, so at most two kernels are on the device at a time.

Kernels of PyTorch and cuBLAS ask for nothing and are waited for like ours. In a captured CUDA graph the launches become
programmatic edges. CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA,
"griddepcontrol".
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

#: The first architecture with it, as Triton counts: 90 is compute capability 9.0.
FIRST_CAPABILITY = 90
#: Set to 1, no launch is dependent: to see what it is worth, or whether a fault is its.
NO_DEPENDENT_LAUNCH = "D2SD_NO_DEPENDENT_LAUNCH"

_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no griddepcontrol
_allowed = ContextVar("allowed", default=os.environ.get(NO_DEPENDENT_LAUNCH) != "1")


@triton.jit
def wait_for_prior_kernels():
    """First statement of every kernel. Nothing on architectures before 9.0, or where the launch is not dependent."""
    if _COMPILED and tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


class DependentKernel(JITFunction):  # type: ignore[misc]
    """A kernel that begins with `wait_for_prior_kernels()`: its launches are dependent where the device can do that."""

    def run(self, *args: Any, **options: Any) -> Any:
        if _allowed.get() and _is_capable():
            options["launch_pdl"] = True
        return super().run(*args, **options)


def dependent_kernel(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit`, with its options, of a kernel that begins with `wait_for_prior_kernels()`."""
    if fn is None:
        return lambda fn: dependent_kernel(fn, **options)
    return DependentKernel(fn, **options) if _COMPILED else triton.jit(fn, **options)


@contextmanager
def without_dependent_launch() -> Iterator[None]:
    """Launches of this thread begin when the kernel before has ended, as `D2SD_NO_DEPENDENT_LAUNCH=1` has it."""
    before = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(before)


def _is_capable() -> bool:
    try:
        device = triton.runtime.driver.active.get_current_device()
    except RuntimeError:  # there is no GPU: who counts launches or compiles ahead of time took the place of Triton's
        return False
    return _device_is_capable(device)


@cache
def _device_is_capable(device: Any) -> bool:
    """By Triton's number of a device."""
    capable: bool = triton.runtime.driver.active.get_current_target().arch >= FIRST_CAPABILITY
    return capable
