"""The fused paged write against its specification: bit by bit, wherever anybody reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from d2sd.plugins.kv_pages import write_pages
from tests.plugins.kernels.calls import there
from tests.plugins.test_kv_pages import KEEP, PATH, POSITIONS, TABLE


def written(fused: bool, k: Tensor, v: Tensor, stored: torch.dtype, *more: Tensor | None) -> tuple[Tensor, Tensor]:
    """The bytes of all pages but the one that nobody reads."""
    pages = torch.full((2, 2, 7, 4, 3, 16), 7.0).to(stored)  # keys and values of L, P, Z, Hkv, D
    if fused:
        pages = there(pages)
        given = [there(x) for x in (TABLE, POSITIONS, KEEP, *more)]
        write_pages.triton(there(k), there(v), pages[0], pages[1], *given)
    else:
        write_pages.reference(k, v, pages[0], pages[1], TABLE, POSITIONS, KEEP, *more)
    k_bytes, v_bytes = pages.cpu().view(torch.uint8)[:, :, 1:]
    return k_bytes, v_bytes


def assert_equal(k: Tensor, v: Tensor, stored: torch.dtype, *more: Tensor | None) -> None:
    for found, expected in zip(written(True, k, v, stored, *more), written(False, k, v, stored, *more), strict=True):
        assert torch.equal(found, expected)


def rows(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, 2, count, 3, 16, generator=draw).to(dtype) for _ in "kv")  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("path", [None, PATH])
def test_equals_specification(dtype: torch.dtype, path: Tensor | None) -> None:
    k, v = rows(4 if path is None else 6, dtype)
    assert_equal(k, v, dtype, path)


def test_layers_may_lie_apart() -> None:
    """A slice of longer rows, as pending context is flushed."""
    k, v = (torch.cat([x, x], dim=1)[:, 1:3] for x in rows(4, torch.float32))
    assert not k.is_contiguous()
    assert_equal(k, v, torch.float32)


def test_fp8_pages() -> None:
    """FP8 numbers times a power of two: the interpreter cannot round to FP8, the division must be exact."""
    scales = torch.tensor([0.25, 0.5]), torch.tensor([1.0, 2.0])
    draw = torch.Generator().manual_seed(3)
    numbers = torch.randint(0, 0x7F, (2, 2, 2, 6, 3, 16), generator=draw, dtype=torch.uint8)
    k, v = (
        x.view(torch.float8_e4m3fn).float() * scale.view(2, 1, 1, 1, 1) * -1
        for x, scale in zip(numbers, scales, strict=True)
    )
    k[0, 0, 0], v[1, 1, 1] = 1e4, -1e4  # saturate
    assert_equal(k, v, torch.float8_e4m3fn, PATH, *scales)
