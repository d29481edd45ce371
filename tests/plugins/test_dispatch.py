"""Ops run their kernels on CUDA and their references on a CPU, and fall back with a warning only."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from d2sd.errors import D2SDError
from d2sd.plugins import dispatch
from d2sd.plugins.cascade_attention import AttnMask, PagedContext, cascade_attention, mask
from d2sd.plugins.dispatch import Implementation, NoKernel
from d2sd.plugins.kv_pages import write_pages


def on_gpu(size: int = 128, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Any:
    """Stands in for a CUDA tensor."""
    is_cuda, shape = device == "cuda", (4, 16, 8, size)
    return SimpleNamespace(device=torch.device(device), is_cuda=is_cuda, is_cpu=not is_cuda, shape=shape, dtype=dtype)


def uses_kernel(pages: Any) -> bool:
    return dispatch.pick("attention", pages, pages=True) is Implementation.TRITON


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name)
    monkeypatch.setattr(dispatch, "triton_version", lambda: dispatch.FENCED_TRITON)
    monkeypatch.delenv(dispatch.NO_FALLBACK, raising=False)
    dispatch.unsupported.cache_clear()
    dispatch._warn_once.cache_clear()


def test_cpu_tensors_take_the_reference(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(dispatch.NO_FALLBACK, "1")
    assert not uses_kernel(torch.zeros(4, 16, 8, 128))
    assert not caplog.records


@pytest.mark.parametrize("size", [64, 96, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_models_of_today_take_the_kernel(size: int, dtype: torch.dtype) -> None:
    assert uses_kernel(on_gpu(size, dtype)) == (size < 512 or dtype in (torch.bfloat16, torch.float16))


@pytest.mark.parametrize(
    ("pages", "reason"),
    [
        (on_gpu(8), "head size 8"),
        (on_gpu(528), "head size 528"),
        (on_gpu(512, torch.float32), "head size 512 is not a multiple of 16 up to 256"),
        (on_gpu(512, torch.float8_e4m3fn), "head size 512 is not a multiple of 16 up to 256"),
        (on_gpu(dtype=torch.float64), "pages of torch.float64"),
    ],
)
def test_a_fallback_warns_once_or_is_forbidden(
    pages: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not uses_kernel(pages)
    assert not uses_kernel(pages)
    (warning,) = caplog.records
    assert (warning.name, warning.levelname) == ("d2sd.plugins.dispatch", "WARNING")
    assert reason in warning.getMessage()
    monkeypatch.setenv(dispatch.NO_FALLBACK, "1")
    with pytest.raises(D2SDError, match=reason):
        uses_kernel(pages)


def test_what_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "8.9" in str(dispatch.unsupported(128, torch.float8_e4m3fn, (8, 0)))
    assert dispatch.unsupported(128, torch.float8_e4m3fn, (8, 9)) is None
    assert "below 8.0" in str(dispatch.unsupported(128, torch.float16, (7, 5)))
    dispatch.unsupported.cache_clear()
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    assert "triton is not installed" in str(dispatch.unsupported(128, torch.bfloat16, (9, 0)))


def test_fp8_products_need_fp8_tensor_cores(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An A100 multiplies the same values in a wider type, after a warning; PyTorch's FP8 product would raise there."""
    x = on_gpu()
    assert dispatch.use_fp8_gemm(x)
    assert not dispatch.use_fp8_gemm(torch.zeros(2, 3))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not dispatch.use_fp8_gemm(x)
    assert not dispatch.use_fp8_gemm(x)
    assert caplog.text.count("FP8 matrix multiplication runs as plain PyTorch") == 1
    monkeypatch.setenv(dispatch.NO_FALLBACK, "1")
    with pytest.raises(D2SDError, match=r"8\.9"):
        dispatch.use_fp8_gemm(x)


#: Of what PyTorch's wheels for CUDA pin; 2.12.1 and later ask for a Triton with the fence.
@pytest.mark.parametrize(
    ("version", "pinned_by", "line"),
    [
        ("3.6.0", "2.11.0+cu130", "pip install --no-deps triton==3.7.1"),
        ("3.7.0", "2.12.0", "pip install --no-deps triton==3.7.1"),
        ("3.7.0", "2.12.1", "pip install 'triton>=3.7.1'"),
    ],
)
def test_triton_that_forgets_a_fence_is_refused(
    version: str, pinned_by: str, line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On Hopper and later; tests/ptx/test_versions.py shows what such a kernel does. It says what to run."""
    monkeypatch.setattr(torch, "__version__", pinned_by)
    monkeypatch.setattr(dispatch, "triton_version", lambda: Version(version))
    assert not uses_kernel(on_gpu())
    assert f"triton {version} leaves out a fence" in caplog.text
    monkeypatch.setenv(dispatch.NO_FALLBACK, "1")
    with pytest.raises(NoKernel, match=rf"triton {version} .*\({line}\)\n"):
        uses_kernel(on_gpu())
    assert dispatch.unsupported(128, torch.bfloat16, (8, 9)) is None
    assert dispatch.unsupported(128, torch.bfloat16, (10, 0)) is not None


@pytest.mark.parametrize("version", ["3.7.1", "3.8.0", "3.9.0+git1234"])
def test_later_triton_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton_version", lambda: Version(version))
    assert uses_kernel(on_gpu())


#: Reached implementations, in order.
Calls = list[str]
KERNEL_SIZE, OTHER_SIZE = 128, 8


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stand-ins for all four implementations, which record that they were called."""
    found: Calls = []

    def stand_in(name: str) -> Any:
        return lambda *arguments, **_: found.append(name)

    for op in (cascade_attention, write_pages):
        monkeypatch.setitem(vars(op), "reference", stand_in("reference"))
        monkeypatch.setitem(vars(op), "triton", stand_in("kernel"))
    return found


def run(device: str, size: int) -> None:
    """Calls both ops over pages on this device, as far as the dispatch looks at them."""
    stored = on_gpu(size, device=device)
    some: Any = torch.ones(1, 1, 1, dtype=torch.bool)
    cascade_attention(some, some, some, PagedContext(stored, stored, some, some), some)
    write_pages(some, some, stored, stored, some, some, some)


def test_cuda_runs_the_kernels(calls: Calls) -> None:
    run("cuda", KERNEL_SIZE)
    assert calls == ["kernel", "kernel"]


@pytest.mark.parametrize("size", [KERNEL_SIZE, OTHER_SIZE])
def test_a_cpu_runs_the_references(calls: Calls, size: int, caplog: pytest.LogCaptureFixture) -> None:
    run("cpu", size)
    assert calls == ["reference", "reference"]
    assert not caplog.records


def test_cuda_without_a_kernel_warns_or_fails(
    calls: Calls, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each op by its own name."""
    run("cuda", OTHER_SIZE)
    assert calls == ["reference", "reference"]
    names = [
        record.getMessage().partition(" runs as plain PyTorch on this GPU: head size 8 ")[0]
        for record in caplog.records
    ]
    assert names == ["attention", "the paged K/V write"]
    monkeypatch.setenv(dispatch.NO_FALLBACK, "1")
    with pytest.raises(D2SDError, match="head size 8"):
        run("cuda", OTHER_SIZE)
    assert calls == ["reference", "reference"]


def test_no_op_falls_back_under_the_name_of_another() -> None:
    """Each folder has a name of its own, but that layers fall back as a whole, and products that are exact alone."""
    folders: dict[str, set[str]] = {}
    for op in OPS.values():
        folders.setdefault(op.what, set()).add(op.folder)
    assert folders.pop("unfused layers") == LAYERS
    assert folders.pop("batch-invariant products") == {"layer_ops"}
    assert sorted(folder for found in folders.values() for folder in found) == sorted(set(FOLDERS) - LAYERS)


def test_layers_share_a_packed_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed once where a kernel runs, and not at all for the reference."""
    pytest.importorskip("triton", reason="the extra triton is not installed")
    from d2sd.plugins.cascade_attention.triton import attend

    packed = list[torch.Tensor]()
    monkeypatch.setattr(mask, "pack_mask_bits", packed.append)
    monkeypatch.setattr(attend, "launch", lambda *_, **__: None)
    monkeypatch.setattr(cascade_attention, "reference", lambda *_, **__: None)
    some: Any = torch.ones(1, 1, 1, dtype=torch.bool)
    for device, times in (("cpu", 0), ("cuda", 1)):
        stored, shared = on_gpu(device=device), AttnMask(some)
        for _ in range(3):
            cascade_attention(some, some, some, PagedContext(stored, stored, some, some), shared)
        assert len(packed) == times


def test_exact_attention_never_falls_back(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    """A model without its kernels is refused when it is loaded."""
    monkeypatch.setitem(vars(cascade_attention), "triton", lambda *_, exact, **__: calls.append(f"exact {exact}"))
    stored, some = on_gpu(OTHER_SIZE), torch.ones(1, 1, 1, dtype=torch.bool)
    cascade_attention(some, some, some, PagedContext(stored, stored, some, some), some, exact=True)
    assert calls == ["exact True"]


def test_only_fp8_pages_have_scales() -> None:
    some, one = torch.zeros(1, 1, 1, 1), torch.ones(())
    with pytest.raises(AssertionError):
        PagedContext(some, some, some, some, one, one)
    fp8 = some.to(torch.float8_e4m3fn)
    with pytest.raises(AssertionError):
        PagedContext(fp8, fp8, some, some)
    assert PagedContext(fp8, fp8, some, some, one, one).fp8


#: Folders with kernels, and their ops.
FOLDERS = sorted(path.parent.name for path in Path(dispatch.__file__).parent.glob("*/triton"))
for folder in FOLDERS:
    import_module(f"d2sd.plugins.{folder}")
OPS, LAYERS = dict(dispatch.OPS), {"layer_ops", "gated_layers"}
#: Those that the compiled library has, alone.
COMPILED = {
    "cascade_attention.cascade_attention", "choice.candidates", "choice.choose", "delta_rule.chunk_delta_rule",
    "delta_rule.commit_delta_rule", "delta_rule.convolution", "delta_rule.tree_delta_rule", "kv_pages.write_pages",
    "lookup.find_copy", "pair_scores.conditioned", "trees.accept", "trees.best_first_tree",
}  # fmt: skip


def test_ops_are_found() -> None:
    assert {"layer_ops.linear", "handover.commit", "kv_pages.write_pages", "trees.best_first_tree"} < OPS.keys()
    assert {op.folder for op in OPS.values()} == set(FOLDERS)


@pytest.mark.parametrize("op", OPS)
def test_all_implementations_take_the_same_arguments(op: str) -> None:
    """By position and by name, with the same defaults."""
    pytest.importorskip("triton", reason="the extra triton is not installed")
    specified = inspect.signature(OPS[op].reference).parameters
    expected = [(name, one.kind, one.default) for name, one in specified.items()]
    for launch in [OPS[op].triton, *([OPS[op].cpu] if op in COMPILED else [])]:
        parameters = inspect.signature(launch).parameters
        assert [(name, one.kind, one.default) for name, one in parameters.items()] == expected


@pytest.mark.parametrize("op", sorted(OPS.keys() - COMPILED))
def test_what_is_not_compiled_is_not_asked_for(op: str) -> None:
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        _ = OPS[op].cpu


def test_an_op_is_its_specification_to_a_reader() -> None:
    assert inspect.signature(write_pages) == inspect.signature(write_pages.reference)
    assert write_pages.__doc__ == write_pages.reference.__doc__


def test_layers_with_heads_above_256_are_not_fused(caplog: pytest.LogCaptureFixture) -> None:
    weight = on_gpu()
    assert dispatch.use_fused_layers(weight, 256, fp8=False, unlike=None)
    assert not dispatch.use_fused_layers(weight, 512, fp8=False, unlike=None)
    assert "head size 512 is above 256" in caplog.text
