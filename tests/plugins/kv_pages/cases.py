"""The paged write, into pools and from rows whose strides take 64 bits."""

from __future__ import annotations

from functools import partial
from typing import Any

from d2sd.plugins.kv_pages import write_pages
from d2sd.plugins.kv_pages.triton.kernel import write_pages_kernel
from tests.plugins.cases import KV_HEADS, PAGE, TYPES, Check, Kernel, some


def write(stored: str, path: bool) -> None:
    rows, pages = some("bf16", 2, 1, 1 << 22, KV_HEADS, 128), some(stored, 2, 1 << 18, PAGE, KV_HEADS, 128)
    places, scales = some("i64", 1, 5), [some("fp32", 2) for _ in "kv"] if stored == "fp8" else []
    write_pages.triton(
        rows, rows, pages, pages, some("i64", 1, 4), places, some("u1", 1, 5), places if path else None, *scales
    )


def touched(values: dict[str, Any], _: int) -> tuple[dict[str, int], int]:
    """Counts every place as kept: at most a block for a request."""
    k, pages, places = values["k"], values["k_pages"], values["positions"].numel()
    numbers = k.shape[0] * places * values["WIDTH"]
    one, other = numbers * k.element_size(), numbers * pages.element_size()
    table = places * values["page_table"].element_size()
    return {"k": one, "v": one, "k_pages": other, "v_pages": other, "page_table": table}, 0


LAUNCHES = {
    "write bf16": partial(write, "bf16", path=False),
    "write bf16 path": partial(write, "bf16", path=True),
    "write bf16/fp8 path": partial(write, "fp8", path=True),
}
KERNELS = (Kernel(write_pages_kernel, ("k_pages", "v_pages"), LAUNCHES, touched=touched),)
CHECKS = {"writes": Check("write_pages", "pages.test_equals_specification", (TYPES["bf16"], "PATH"), barriers=False)}
