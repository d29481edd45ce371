"""Triton's hook reports each kernel that is compiled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="the extra triton is not installed")

from triton import knobs  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]

from d2sd.plugins.compilations import watch_compilations
from d2sd.plugins.kv_pages.triton.kernel import write_pages_kernel


def test_a_compiled_kernel_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the call that Triton makes behind each compilation; the last function given is called."""
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    seen: list[str] = []
    watch_compilations(lambda name: seen.append(f"early {name}"))
    watch_compilations(seen.append)
    options = SimpleNamespace(
        num_warps=4, num_ctas=1, num_stages=3, enable_fp_fusion=True, launch_cooperative_grid=False, extern_libs=()
    )
    key, target = ("key", ["*bf16"]), GPUTarget("cuda", 90, 32)
    hook = knobs.runtime.jit_post_compile_hook
    write_pages_kernel._call_hook(hook, key, {}, target, 0, {}, options, [{}], False)
    assert seen == ["write_pages_kernel"]
