"""Which implementation an op runs: the kernel on CUDA, the reference on a CPU, never the other without a warning."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from d2sd.errors import D2SDError
from d2sd.plugins import cascade_attention as attention
from d2sd.plugins import dispatch
from d2sd.plugins import kv_pages as pages
from d2sd.plugins.cascade_attention import AttnMask, PagedContext, cascade_attention
from d2sd.plugins.kv_pages import write_pages

#: Reached implementations, in order.
Calls = list[str]
KERNEL_SIZE, OTHER_SIZE = 128, 8


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A Hopper GPU and stand-ins for all four implementations, which record that they were called."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name)
    monkeypatch.setattr(dispatch, "triton_version", lambda: dispatch.FENCED_TRITON)
    monkeypatch.delenv(dispatch.NO_FALLBACK, raising=False)
    dispatch.unsupported.cache_clear()
    dispatch._warn_once.cache_clear()
    found: Calls = []

    def stand_in(name: str) -> Any:
        return lambda *arguments, **_: found.append(name)

    monkeypatch.setattr(attention, "cascade_attention_reference", stand_in("reference"))
    monkeypatch.setattr(pages, "write_pages_reference", stand_in("reference"))
    for op in ("cascade_attention", "kv_pages"):
        name = f"d2sd.plugins.{op}.triton.launch"
        kernels = dict.fromkeys(("cascade_attention_triton", "write_pages_triton"), stand_in("kernel"))
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**kernels))
    return found


def run(device: str, size: int) -> None:
    """Both ops over pages on this device, as far as the dispatch looks at them."""
    stored: Any = SimpleNamespace(device=torch.device(device), shape=(4, 16, 8, size), dtype=torch.bfloat16)
    some: Any = torch.ones(1, 1, 1, dtype=torch.bool)
    cascade_attention(some, some, some, PagedContext(stored, stored, some, some), some)
    write_pages(some, some, stored, stored, some, some, some)


def test_cuda_runs_the_kernels(calls: Calls) -> None:
    run("cuda", KERNEL_SIZE)
    assert calls == ["kernel", "kernel"]


@pytest.mark.parametrize("size", [KERNEL_SIZE, OTHER_SIZE])
def test_a_cpu_runs_the_references(calls: Calls, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    run("cpu", size)
    assert calls == ["reference", "reference"]
    assert not capsys.readouterr().err


def test_cuda_without_a_kernel_warns_or_fails(
    calls: Calls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("cuda", OTHER_SIZE)
    assert calls == ["reference", "reference"]
    assert capsys.readouterr().err.count("head size 8") == 1
    monkeypatch.setenv(dispatch.NO_FALLBACK, "1")
    with pytest.raises(D2SDError, match="head size 8"):
        run("cuda", OTHER_SIZE)
    assert calls == ["reference", "reference"]


def test_layers_share_a_packed_mask(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed once where a kernel runs, and not at all for the reference."""
    packed = []
    monkeypatch.setattr("d2sd.plugins.cascade_attention.mask.pack_mask_bits", lambda mask: packed.append(mask))
    for device, times in (("cpu", 0), ("cuda", 1)):
        stored: Any = SimpleNamespace(device=torch.device(device), shape=(4, 16, 8, 128), dtype=torch.bfloat16)
        some: Any = torch.ones(1, 1, 1, dtype=torch.bool)
        mask = AttnMask(some)
        for _ in range(3):
            cascade_attention(some, some, some, PagedContext(stored, stored, some, some), mask)
        assert len(packed) == times


def test_exact_attention_never_falls_back(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    """A model without its kernels is refused when it is loaded."""
    launcher = SimpleNamespace(
        key_order_triton=lambda mask: calls.append("order"),
        exact_attention_triton=lambda *_, **__: calls.append("exact kernel"),
    )
    monkeypatch.setitem(sys.modules, "d2sd.plugins.cascade_attention.triton.exact", launcher)
    stored: Any = SimpleNamespace(device=torch.device("cuda"), shape=(4, 16, 8, OTHER_SIZE), dtype=torch.bfloat16)
    some: Any = torch.ones(1, 1, 1, dtype=torch.bool)
    mask = AttnMask(some)
    for _ in range(2):
        cascade_attention(some, some, some, PagedContext(stored, stored, some, some), mask, exact=True)
    assert calls == ["order", "exact kernel", "exact kernel"]


def test_only_fp8_pages_have_scales() -> None:
    some, one = torch.zeros(1, 1, 1, 1), torch.ones(())
    with pytest.raises(AssertionError):
        PagedContext(some, some, some, some, one, one)
    fp8 = some.to(torch.float8_e4m3fn)
    with pytest.raises(AssertionError):
        PagedContext(fp8, fp8, some, some)
    assert PagedContext(fp8, fp8, some, some, one, one).fp8
