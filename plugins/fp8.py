"""What an FP8 (E4M3) page makes of a key or a value, and what is read back.

    written   f = fp8(x / s)         |f| ≤ 448, rounded to nearest even, saturating; divided in fp32
    read      y = (f · s) in the model's type                one scale s a layer for keys, one for values

Reading back and writing again changes nothing that is read: y / s lies nearer to f than to any other FP8 number. So a
row whose K/V were rounded this way before it was committed (`d2sd.modeling.fp8.Fp8Cache`) reads the same afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Largest E4M3 number.
LARGEST = 448.0


def to_pages(x: Tensor, scale: Tensor) -> Tensor:
    """fp8(x / scale), any shape; `scale` fp32, broadcast."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def from_pages(pages: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8 numbers times `scale`, rounded once to `dtype`."""
    return (pages.float() * scale).to(dtype)
