"""min-p, top-k and top-p in registers. The specification: `d2sd.runtime.sampling.filters`."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from d2sd.plugins.order import ascending_of


@triton.jit
def _precise(x):
    return libdevice.exp(x)


@triton.jit
def _interpreted(x):
    return tl.exp(x)


#: The exponential of CUDA's and PyTorch's fp32; `tl.exp` has fewer digits. The interpreter has one only.
exp = _interpreted if triton.knobs.runtime.interpret else _precise


@triton.jit
def kept_of_pool(
    scaled, inside, request, min_p, top_k, top_p, SIZE: tl.constexpr,
    MIN_P: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """Which of the SIZE scaled logits of one row the filters of `request` keep."""
    key = ascending_of(scaled)
    larger = key[None, :] > key[:, None]
    best = tl.max(scaled, axis=0)
    kept = inside
    if MIN_P:
        kept = kept & (scaled >= best + tl.log(tl.load(min_p + request)))
    if TOP_K:
        above = tl.sum((larger & kept[None, :]).to(tl.int64), axis=1)
        kept = kept & (above < tl.load(top_k + request))
    if TOP_P:
        mass = tl.where(kept, (exp(scaled - best) * 1099511627776.0).to(tl.int64) + 1, 0)
        above = tl.sum(tl.where(larger, mass[None, :], 0), axis=1)
        kept = kept & (above < mass_limit(tl.sum(mass, axis=0), tl.load(top_p + request)))
    return kept


@triton.jit
def mass_limit(total, share):
    """The mass that keeps `share` of the total: int64, 1 or more; past the total where top-p is off."""
    limit = tl.ceil(total.to(tl.float64) * tl.where(share < 1, share, 0.0).to(tl.float64)).to(tl.int64)
    return tl.where(share < 1, tl.where(limit < 1, 1, limit), total + 1)
