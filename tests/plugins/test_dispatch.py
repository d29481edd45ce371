"""When ops run as kernels: stated, not guessed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from d2sd.errors import D2SDError
from d2sd.plugins import dispatch


def on_gpu(size: int = 128, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Stands in for a CUDA tensor."""
    return SimpleNamespace(device=torch.device("cuda"), shape=(4, 16, 8, size), dtype=dtype)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name)
    monkeypatch.delenv(dispatch.NO_FALLBACK, raising=False)
    dispatch.unsupported.cache_clear()
    dispatch._warn_once.cache_clear()


def test_cpu_tensors_take_the_reference(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(dispatch.NO_FALLBACK, "1")
    assert not dispatch.use_triton(torch.zeros(4, 16, 8, 128))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_models_of_today_take_the_kernel(size: int, dtype: torch.dtype) -> None:
    assert dispatch.use_triton(on_gpu(size, dtype))


@pytest.mark.parametrize(
    ("pages", "reason"),
    [
        (on_gpu(8), "head size 8"),
        (on_gpu(512), "head size 512"),
        (on_gpu(dtype=torch.float64), "pages of torch.float64"),
    ],
)
def test_a_fallback_warns_once_or_is_forbidden(
    pages: Any, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not dispatch.use_triton(pages)
    assert not dispatch.use_triton(pages)
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    monkeypatch.setenv(dispatch.NO_FALLBACK, "1")
    with pytest.raises(D2SDError, match=reason):
        dispatch.use_triton(pages)


def test_what_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "8.9" in str(dispatch.unsupported(128, torch.float8_e4m3fn, (8, 0)))
    assert dispatch.unsupported(128, torch.float8_e4m3fn, (8, 9)) is None
    assert "below 8.0" in str(dispatch.unsupported(128, torch.float16, (7, 5)))
    dispatch.unsupported.cache_clear()
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    assert "triton is not installed" in str(dispatch.unsupported(128, torch.bfloat16, (9, 0)))


def test_fp8_products_need_fp8_tensor_cores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An A100 multiplies the same values in a wider type, after a warning; PyTorch's FP8 product would raise there."""
    x = on_gpu()
    assert dispatch.use_fp8_gemm(x)
    assert not dispatch.use_fp8_gemm(torch.zeros(2, 3))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not dispatch.use_fp8_gemm(x)
    assert not dispatch.use_fp8_gemm(x)
    assert capsys.readouterr().err.count("FP8 matrix multiplication runs as plain PyTorch") == 1
    monkeypatch.setenv(dispatch.NO_FALLBACK, "1")
    with pytest.raises(D2SDError, match=r"8\.9"):
        dispatch.use_fp8_gemm(x)
