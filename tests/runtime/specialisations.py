"""The specialisations of kernels that an engine asks for, before its first request and after: Triton compiles each.

A specialisation is what Triton's own binder makes of a launch's arguments: their types, constants, which numbers are 1
or multiples of 16, and which addresses are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import make_backend  # type: ignore[import-untyped]
from triton.runtime.jit import create_function_from_signature  # type: ignore[import-untyped]


class Pointer:
    """A tensor to Triton's binder: its type, and whether its address is a multiple of 16."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self._offset = tensor.dtype, int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return 1 << 20 | self._offset % 16


def _bound(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_bound, value))
    return Pointer(value) if isinstance(value, Tensor) else value


class Specialisations:
    """The specialisations that launches have asked for, by when."""

    def __init__(self) -> None:
        self.phase = "warm"
        self.found: dict[str, set[str]] = {"warm": set(), "day": set()}
        self._backend = make_backend(GPUTarget("cuda", 90, 32))
        self._binders: dict[Any, Any] = {}

    def note(self, kernel: Any, *args: Any, **options: Any) -> None:
        """Note the specialisation of a launch."""
        if kernel not in self._binders:
            self._binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        options |= {"debug": False}
        _, specialization, rest = self._binders[kernel](*map(_bound, args), **options)
        self.found[self.phase].add(f"{kernel.__name__} {specialization} {rest}")

    @property
    def late(self) -> list[str]:
        return sorted(self.found["day"] - self.found["warm"])


def launched(kernel: Any, asked: Specialisations, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """In place of `JITFunction.run`."""
    asked.note(kernel, *args, **options)
