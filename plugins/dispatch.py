"""Whether an op runs as its fused kernel or as its specification.

CPU tensors take the specification. CUDA tensors take the kernel; where that cannot be, stderr is told once that they
take the specification. Under `D2SD_NO_FALLBACK=1` that is an error, so that a measurement is of what it says.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec

import torch

from d2sd.errors import D2SDError
from d2sd.plugins.cascade_attention.triton.tiles import HEAD_STEP, LARGEST_HEAD

#: Types of queries, and of pages that are not FP8.
TYPES = (torch.float16, torch.bfloat16, torch.float32)
NO_FALLBACK = "D2SD_NO_FALLBACK"


def use_triton(pages: torch.Tensor) -> bool:
    """Do ops over these pages [..., D] run as kernels? Raises D2SDError where they would have to and cannot."""
    if pages.device.type != "cuda":
        return False
    reason = unsupported(pages.shape[-1], pages.dtype, torch.cuda.get_device_capability(pages.device))
    if reason is None:
        return True
    if os.environ.get(NO_FALLBACK) == "1":
        raise D2SDError(
            "Attention would run as plain PyTorch on this GPU.", where=f"{NO_FALLBACK}=1", found=reason,
            fix=f"without {NO_FALLBACK} it runs that way, slower",
        )  # fmt: skip
    _tell(reason)
    return False


@cache
def unsupported(size: int, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Why the kernels do not take heads of this size in pages of this type; None: they do."""
    if find_spec("triton") is None:
        return "triton is not installed (pip install 'd2sd[triton]')"
    if size % HEAD_STEP or not 0 < size <= LARGEST_HEAD:
        return f"head size {size} is no multiple of {HEAD_STEP} up to {LARGEST_HEAD}"
    if dtype == torch.float8_e4m3fn:
        # Older ones have no instruction that widens E4M3.
        return None if capability >= (8, 9) else f"FP8 pages need compute capability 8.9, this is {capability}"
    if dtype not in TYPES:
        return f"pages of {dtype}"
    return None if capability >= (8, 0) else f"compute capability {capability} is below 8.0"


@cache
def _tell(reason: str) -> None:
    print(f"d2sd: attention runs as plain PyTorch on this GPU: {reason}", file=sys.stderr, flush=True)
