"""Launches the kernels, by the arguments of the ops in reference.py. Shapes alone decide how, and nothing is read on
the host: a CUDA graph can capture all of it.

Triton launches on the current device: callers make the tensors' device the current one, once a pass.
"""

# Triton has no types, and may be missing where a user's type checker follows these sources.
# mypy: disable-error-code="no-untyped-def,import-untyped,import-not-found"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2 as power

from d2sd.plugins.layer_ops.triton.kernel import (
    add_rms_norm_kernel,
    embed_norm_rope_kernel,
    qk_norm_rope_kernel,
    quantize_kernel,
    rope_tables_kernel,
    silu_mul_kernel,
)
from d2sd.plugins.layer_ops.types import Behind, PagedRows

# Shape letters as in d2sd/plugins/layer_ops/__init__.py.

INTERPRET = triton.knobs.runtime.interpret
#: Heads of one program of `qk_norm_rope`: with 64 lanes of each half, eight bf16 numbers a thread and load.
HEADS_A_PROGRAM = 4
#: Numbers of one program of the elementwise kernels.
BLOCK = 1024
#: And their warps: eight numbers a thread.
WARPS = 4
#: Products are rounded before they are added, as between PyTorch's kernels. Where the compiler would choose, it might
#: choose differently in two loops of `linear` that must agree.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def written(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, scale: Tensor | None, out: Tensor | None
) -> Tensor:
    """The memory of an op's result: `out`, or its own. In FP8 where `scale` quantizes."""
    made = dtype if scale is None else torch.float8_e4m3fn
    out = torch.empty(shape, dtype=made, device=device) if out is None else out
    assert out.is_contiguous()
    assert (out.shape, out.dtype) == (shape, made)
    return out


def add_rms_norm(x, branch, weight, eps, *, total=None, scale=None, out=None, block=0, offset=False):
    assert not block or (total is None and len(x) % block == 0)
    rows, width = len(x) - (len(x) // block if block else 0), x.shape[1]
    assert x.stride(1) == 1
    assert branch is None or branch.is_contiguous()
    assert total is None or total.stride(1) == 1
    out = written((rows, width), x.dtype, x.device, scale, out)
    strides = x.stride(0), 0 if total is None else total.stride(0)
    add_rms_norm_kernel[rows,](
        x,
        branch,
        weight,
        total,
        out,
        scale,
        **norm_constants(width, eps, *strides, block, offset),
        num_warps=norm_warps(width),
        **OPTIONS,
    )
    return out


@cache
def norm_constants(
    width: int, eps: float, x_stride: int, total_stride: int, block: int, offset: bool
) -> dict[str, Any]:
    """Compile-time constants of `add_rms_norm_kernel`: E, strides of rows, rows of which the first is left out, and
    whether 1 is added to weights.
    """
    strides = {"X_STRIDE": x_stride, "TOTAL_STRIDE": total_stride}
    return {"EPS": eps, "WIDTH": width, "PADDED": power(width), **strides, "BLOCK": block, "OFFSET": offset}


def norm_warps(width: int) -> int:
    """16 numbers a thread, in loads of eight; at most 16 warps."""
    warps: int = power(width) // 512
    return max(1, min(16, warps))


def qk_norm_rope(qkv, cos, sin, heads, k, v, paged=None):
    layers, rows, _ = qkv.shape
    assert qkv[0].is_contiguous()
    assert k[0].is_contiguous()
    assert v[0].is_contiguous()
    assert k.stride(0) == v.stride(0)
    q = torch.empty(rows, heads.queries, heads.size, dtype=cos.dtype, device=qkv.device)
    grid = rows, triton.cdiv(heads.queries + 2 * heads.kv, HEADS_A_PROGRAM), layers
    sizes = (0, 1, 0, 1)
    if paged is not None:
        sizes = paged.keep.numel(), paged.keep.shape[1], paged.page_table.shape[1], paged.k_pages.shape[1]
    qk_norm_rope_kernel[grid](
        qkv, cos, sin, heads.q_norm, heads.k_norm, heads.bias, heads.scales, heads.k_scale, heads.v_scale,
        q if heads.queries else None, k, v, *_pages(paged), qkv.stride(0), k.stride(0), *sizes[:3],
        **rope_constants(
            heads.queries, heads.kv, heads.size, heads.eps, sizes[3], heads.rotary, heads.gated, heads.norm_offset
        ),
        num_warps=1, **OPTIONS,
    )  # fmt: skip
    return q


def _pages(paged: PagedRows | None) -> tuple[Tensor | None, ...]:
    """Arguments of `qk_norm_rope_kernel`."""
    if paged is None:
        return (None,) * 5
    assert paged.k_pages.is_contiguous()
    assert paged.v_pages.is_contiguous()
    return paged.k_pages, paged.v_pages, *(x.contiguous() for x in (paged.page_table, paged.positions, paged.keep))


@cache
def rope_constants(
    queries: int,
    kv_heads: int,
    size: int,
    eps: float,
    page_size: int,
    rotary: int | None = None,
    gated: bool = False,
    offset: bool = False,
) -> dict[str, Any]:
    """Compile-time constants of `qk_norm_rope_kernel`: Hq, Hkv, D, Z, and those of `Heads`."""
    return {
        "EPS": eps,
        "HQ": queries,
        "HKV": kv_heads,
        "HEAD": size // 2,
        "PADDED": power(size // 2),
        "ROTARY": (rotary or size) // 2,
        "GATED": gated,
        "OFFSET": offset,
        "BLOCK": HEADS_A_PROGRAM,
        "PAGE": page_size,
    }


def silu_mul(gate_up, dtype, *, scales=None, scale=None, out=None):
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = written((rows, width), dtype, gate_up.device, scale, out)
    silu_mul_kernel[rows, triton.cdiv(width, BLOCK)](
        gate_up, scales, out, scale, **silu_constants(width, dtype), num_warps=WARPS, **OPTIONS
    )
    return out


@cache
def silu_constants(width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time constants of `silu_mul_kernel`: I and the model's type."""
    return {"WIDTH": width, "BLOCK": BLOCK, "TYPE": _TYPES[dtype], "INTERPRET": INTERPRET}


def rope_tables(positions, frequencies, factor, dtype, front=None):
    first = 0 if front is None else front.numel()
    rows = first + positions.numel()
    cos, sin = torch.empty(2, rows, len(frequencies), dtype=dtype, device=positions.device).unbind()
    rope_tables_kernel[rows,](
        positions.contiguous(),
        None if front is None else front.contiguous(),
        frequencies,
        cos,
        sin,
        first,
        **table_constants(len(frequencies), factor),
        num_warps=1,
        **OPTIONS,
    )
    return cos, sin


@cache
def table_constants(half: int, factor: float) -> dict[str, Any]:
    """Compile-time constants of `rope_tables_kernel`: D/2 and the factor of cosines and sines."""
    return {"FACTOR": factor, "HEAD": half, "PADDED": power(half), "INTERPRET": INTERPRET}


def embed_norm_rope(
    tokens, table, weight, eps, positions, frequencies, factor, *, scale=None, out=None, front=None, offset=False
):
    before, own, width = 0 if front is None else len(front.x), tokens.numel(), table.shape[1]
    x = table.new_empty(own, width)
    out = written((before + own, width), table.dtype, table.device, scale, out)
    assert table.is_contiguous()
    assert front is None or (front.x.is_contiguous() and front.positions.numel() == before)
    start, steps = (positions.start, positions.steps) if isinstance(positions, Behind) else (None, positions.flatten())
    assert steps.numel() == own
    if steps.stride(-1) != 1:
        steps = steps.contiguous()
    cos, sin = table.new_empty(2, before + own, len(frequencies)).unbind()
    embed_norm_rope_kernel[before + own,](
        tokens.contiguous(),
        table,
        weight,
        None if start is None else start.contiguous(),
        steps,
        frequencies,
        *((None, None, None) if front is None else (front.x, front.weight, front.positions.contiguous())),
        x,
        out,
        cos,
        sin,
        scale,
        before,
        steps.shape[-1],
        0 if start is None else steps.stride(0),
        **embed_constants(width, eps, len(frequencies), factor, offset),
        num_warps=norm_warps(width),
        **OPTIONS,
    )
    return x, out, cos, sin


@cache
def embed_constants(width: int, eps: float, half: int, factor: float, offset: bool) -> dict[str, Any]:
    """Compile-time constants of `embed_norm_rope_kernel`: E, D/2, the factor of cosines and sines, and whether 1 is
    added to weights.
    """
    norm = {"EPS": eps, "WIDTH": width, "PADDED": power(width), "OFFSET": offset}
    return norm | {"FACTOR": factor, "HEAD": half, "HALF": power(half), "INTERPRET": INTERPRET}


def quantize(x, scale, out=None):
    out = written(x.shape, x.dtype, x.device, scale, out)
    assert x.is_contiguous()
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # a drafter's `fc` runs outside of its fused layers
        grid = (triton.cdiv(x.numel(), BLOCK),)
        quantize_kernel[grid](x, scale, out, x.numel(), BLOCK=BLOCK, num_warps=WARPS, **OPTIONS)
    return out
