"""Kernels of the handover: of a request, and of a large batch."""

from __future__ import annotations

from functools import partial

from d2sd.plugins.handover.triton.kernel import begin_kernel, begin_triton, end_kernel, end_triton
from tests.plugins.cases import Check, Kernel, some


def begin(size: int) -> None:
    number, flag = some("i64", size), some("u1", size)
    begin_triton(number, number, flag, flag, number, some("i64", 3, size + 1))


def end(size: int) -> None:
    number, tokens, stop = some("i64", size), some("i64", size, 16), some("i64", size, 8)
    end_triton(number, some("u1", size), tokens, tokens[:, 0], number, stop, some("i64", 3, size + 1))


KERNELS = (
    Kernel(
        begin_kernel,
        ("new_anchor", "new_context_len", "new_active"),
        {f"handover to {size}": partial(begin, size) for size in (1, 32)},
    ),
    Kernel(end_kernel, ("state",), {f"handover of {size}": partial(end, size) for size in (1, 32)}),
)
CHECKS = {"handover": Check("begin end", "handover.test_handover", (5, 3, 4), barriers=False)}
