"""Rounding to FP8 (E4M3) with a scale, and back: K/V pages, and weights and inputs of FP8 layers.

    written   f = fp8(x / s)         |f| ≤ 448, rounded to nearest even, saturating; divided in fp32
    read      y = (f · s) in the model's type                one scale s a layer for keys, one for values

Writing y again stores the same f, because y / s is nearer to f than to any other E4M3 number (in FP16 for s >= 2^-15).
So K/V that were rounded this way before they attended (`d2sd.modeling.fp8.Fp8Cache`) do not change when committed.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: The largest E4M3 number.
LARGEST = 448.0


def to_pages(x: Tensor, scale: Tensor) -> Tensor:
    """fp8(x / scale), any shape; `scale` fp32, broadcast."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def from_pages(pages: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """E4M3 numbers times `scale`, rounded once to `dtype`."""
    return (pages.float() * scale).to(dtype)


def stored(x: Tensor, scale: Tensor | None, out: Tensor | None) -> Tensor:
    """An op's result x, or with `scale` fp8(x / scale): in `out` where that is given."""
    result = x if scale is None else to_pages(x, scale)
    return result if out is None else out.copy_(result)
