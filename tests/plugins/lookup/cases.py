"""Kernels of lookup, for a block of 16."""

from __future__ import annotations

from d2sd.plugins.lookup import LENGTHS, SUPPORT, CopyScores, Text, append, find_copy
from d2sd.plugins.lookup.triton.kernel import append_kernel, copy_kernel
from d2sd.plugins.trees import Accepted, Draft
from tests.plugins.cases import PAGE, Check, Kernel, some

SLOTS = 15
TEXT = Text(some("i64", 9, PAGE), some("i64", 2, 4), some("i64", 2), some("i64", 2))


def copy() -> None:
    first = Draft(some("i64", 2, SLOTS, 16), some("fp32", 2, SLOTS, 16))
    find_copy.triton(TEXT, first, CopyScores(some("fp32", 2, len(LENGTHS), len(SUPPORT) + 2, SLOTS)), some("fp32", 2))


def write() -> None:
    path = some("i64", 2, 16)
    append.triton(TEXT, some("i64", 2, 64), Accepted(path, path[:, 0], path, path[:, 0]), some("u1", 2))


KERNELS = (
    Kernel(copy_kernel, ("tokens", "length", "logprob"), {"copy": copy}),
    Kernel(append_kernel, ("pages",), {"append": write}),
)
CHECKS = {
    "copy": Check("copy", "lookup.test_copy", (3, 2, 2, 21)),
    "append": Check("append", "lookup.test_append", (5,), barriers=False),
}
