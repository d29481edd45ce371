"""Quantization inside kernels: what `fp8.to_pages` does before its last rounding."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_fp8_range(x, scale):
    """x / scale within E4M3's range. IEEE division, or a tie would round to the other side than in the reference."""
    return tl.clamp(tl.div_rn(x.to(tl.float32), scale), -448.0, 448.0)
