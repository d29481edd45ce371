"""What the launchers hand to Triton is what `make kernels` compiles: the same types, the same constants.

Triton binds the arguments and compiles for an H100 that is not there; nothing is launched.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]

from d2sd.plugins.cascade_attention import PagedContext
from d2sd.plugins.cascade_attention.triton import launch as attention
from d2sd.plugins.cascade_attention.triton.kernel import cascade_attention_kernel, merge_kernel
from d2sd.plugins.kv_pages.triton import launch as pages
from d2sd.plugins.kv_pages.triton.kernel import write_pages_kernel

SCRIPT = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "compile_kernels.py"))
triton.runtime.driver.set_active(
    SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
)  # fmt: skip


class Bound:
    """Stands in for a kernel: binds and compiles where that would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compiled(*arguments: Any, **options: Any) -> None:
            self.source = self.kernel.warmup(*arguments, grid=grid, **options).src

        return compiled

    def types(self) -> dict[str, str]:
        return {name: kind for name, kind in self.source.signature.items() if kind != "constexpr"}

    def constants(self) -> dict[str, Any]:
        found = {self.kernel.arg_names[place]: value for (place,), value in self.source.constants.items()}
        return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize("splits", [1, 4])
def test_attention(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = Bound(cascade_attention_kernel)
    monkeypatch.setattr(attention, "cascade_attention_kernel", bound)
    monkeypatch.setattr(attention, "merge_kernel", Bound(merge_kernel))
    q, k = torch.zeros(1, 1, 32, 128, dtype=torch.bfloat16), torch.zeros(1, 1, 8, 128, dtype=torch.bfloat16)
    stored, one = torch.zeros(3, 16, 8, 128, dtype=torch.float8_e4m3fn), torch.ones(())
    table, length, mask = torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, dtype=torch.long), torch.ones(1, 1, 1)
    attention.launch(q, k, k, PagedContext(stored, stored, table, length, one, one), mask.int(), splits=splits)
    variant = SCRIPT["attention_variant"]("bf16", SCRIPT["FP8"], 128, rows=1, splits=splits)
    assert bound.types() == variant.types
    assert bound.constants() == variant.constants


def test_write(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = Bound(write_pages_kernel)
    monkeypatch.setattr(pages, "write_pages_kernel", bound)
    rows, stored = torch.zeros(2, 1, 5, 8, 128).bfloat16(), torch.zeros(2, 3, 16, 8, 128).bfloat16()
    places = torch.zeros(1, 4, dtype=torch.long)
    pages.write_pages_triton(rows, rows, stored, stored, places, places, places == 0, places)
    variant = SCRIPT["write_variant"]("bf16", "bf16", path=True)
    strides = {"row_stride": "i32", "page_stride": "i32"}  # 64 bits where a pool is large, as it is compiled ahead
    assert bound.types() == variant.types | strides
    assert bound.constants() == variant.constants
