"""Kernels of the handover: of a request, and of a large batch."""

from __future__ import annotations

from functools import partial
from typing import Any

from d2sd.plugins.handover import begin, commit, end
from d2sd.plugins.handover.triton.kernel import begin_kernel, commit_kernel, end_kernel
from tests.plugins.cases import Check, Kernel, some


def launch_begin(size: int) -> None:
    number, flag = some("i64", size), some("u1", size)
    begin.triton(number, number, flag, flag, number, some("i64", 3, size + 1))


def launch_end(size: int) -> None:
    number, tokens, stop = some("i64", size), some("i64", size, 16), some("i64", size, 8)
    end.triton(number, some("u1", size), tokens, tokens[:, 0], number, stop, some("i64", 3, size + 1))


def launch_commit(size: int, features: int, tables: int) -> None:
    path, number, kept = some("i64", size, 16), some("i64", size), some("u1", size, 16)
    given, pages = some("bf16", size, 64, features), [some("i64", size, 130)] * tables
    into = [some("bf16", size, 16, features), path, kept, *pages] if tables else None
    commit.triton(path, number, kept[:, 0], number, given, pages, into)


def committed(values: dict[str, Any], _: int) -> tuple[dict[str, int], int]:
    """The features of the path's nodes."""
    path, features = values["path"], values["features"]
    return {"features": path.numel() * features.shape[-1] * features.element_size()}, 0


KERNELS = (
    Kernel(
        begin_kernel,
        ("new_anchor", "new_context_len", "new_active"),
        {f"handover to {size}": partial(launch_begin, size) for size in (1, 32)},
    ),
    Kernel(end_kernel, ("state",), {f"handover of {size}": partial(launch_end, size) for size in (1, 32)}),
    Kernel(
        commit_kernel,
        ("new_features", "positions", "keep", "new_table", "new_windowed"),
        {
            f"commit {size}x{features} with {tables} tables": partial(launch_commit, size, features, tables)
            for size, features, tables in ((1, 20480, 1), (32, 20480, 2), (8, 0, 0))
        },
        touched=committed,
    ),
)
CHECKS = {
    "handover": Check("begin end", "handover.test_handover", (5, 3, 4), barriers=False),
    "commit": Check("commit", "handover.test_commit", (3, 4, 7, 5, 2), barriers=False),
}
