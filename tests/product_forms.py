"""PyTorch's products of CUDA on CPU tensors, by their documentation, for tests of forms that need them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

_bmm = torch.bmm


def scaled_mm(
    a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """`torch._scaled_mm` with a scale a tensor: fp32 sums, scaled and rounded once."""
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert (a.is_contiguous(), b.stride(0), scale_a.shape, scale_b.shape) == (True, 1, (), ())
    assert (a.shape[1] % 16, b.shape[1] % 16) == (0, 0), "cuBLAS takes multiples of 16"
    result = (a.double() @ b.double() * scale_a * scale_b).to(out_dtype)
    return result if out is None else out.copy_(result)


def bmm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """`torch.bmm` that need not round its sums."""
    return _bmm(a, b) if out_dtype is None else _bmm(a.to(out_dtype), b.to(out_dtype))


@pytest.fixture
def cuda_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors take the products of CUDA."""
    products: dict[str, Any] = {"_scaled_mm": scaled_mm, "bmm": bmm}
    for name, product in products.items():
        monkeypatch.setattr(torch, name, product)
