"""When ops run as kernels: told, not guessed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from d2sd.errors import D2SDError
from d2sd.plugins import dispatch as fused


def on_gpu(size: int = 128, dtype: torch.dtype = torch.bfloat16) -> Any:
    """As much of a CUDA tensor as is asked for."""
    return SimpleNamespace(device=torch.device("cuda"), shape=(4, 16, 8, size), dtype=dtype)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(fused, "find_spec", lambda name: name)
    monkeypatch.delenv(fused.NO_FALLBACK, raising=False)
    fused.unsupported.cache_clear()
    fused._warn_once.cache_clear()


def test_cpu_tensors_take_the_specification(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(fused.NO_FALLBACK, "1")
    assert not fused.use_triton(torch.zeros(4, 16, 8, 128))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_models_of_today_take_the_kernel(size: int, dtype: torch.dtype) -> None:
    assert fused.use_triton(on_gpu(size, dtype))


@pytest.mark.parametrize(
    ("pages", "told"),
    [
        (on_gpu(8), "head size 8"),
        (on_gpu(512), "head size 512"),
        (on_gpu(dtype=torch.float64), "pages of torch.float64"),
    ],
)
def test_a_fallback_is_told_once_or_forbidden(
    pages: Any, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not fused.use_triton(pages)
    assert not fused.use_triton(pages)
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    monkeypatch.setenv(fused.NO_FALLBACK, "1")
    with pytest.raises(D2SDError, match=told):
        fused.use_triton(pages)


def test_what_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "8.9" in str(fused.unsupported(128, torch.float8_e4m3fn, (8, 0)))
    assert fused.unsupported(128, torch.float8_e4m3fn, (8, 9)) is None
    assert "below 8.0" in str(fused.unsupported(128, torch.float16, (7, 5)))
    fused.unsupported.cache_clear()
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    assert "triton is not installed" in str(fused.unsupported(128, torch.bfloat16, (9, 0)))
