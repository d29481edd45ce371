"""The ops of a transformer layer but attention, a kernel each, for inference on CUDA.

    reference.py     the specification in plain PyTorch, in `modeling/layers.py`'s order of rounding
    triton/          the kernels and their launchers

    op               takes the place of                                         products around it
    add_rms_norm     the residual addition, RMSNorm, quantisation               o or down  ->  qkv or gate-up
    qk_norm_rope     norms and rotation of q and k, biases, FP8 K/V             qkv        ->  attention
    silu_mul         silu(gate) * up, quantisation                              gate-up    ->  down
    embed_norm_rope  embeddings, the first norm, cosines and sines of a pass      ->  the first qkv
    rope_tables      cosines and sines of a pass whose rows are not tokens
    quantize         the input of an FP8 product that no other op makes
    linear           a product whose rows are the same bits in every batch, with `exact`; others are PyTorch's

Each op picks its implementation by device: CPU tensors take the reference, CUDA tensors the kernel. Whether a model
may call them on CUDA is asked once, when it is loaded (`d2sd.plugins.dispatch.use_fused_layers`).
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from d2sd.plugins import dispatch
from d2sd.plugins.dispatch import Implementation
from d2sd.plugins.layer_ops import reference
from d2sd.plugins.layer_ops.heads import Heads, PagedRows
from d2sd.plugins.layer_ops.rows import Behind, Front

__all__ = [
    "Behind",
    "Front",
    "Heads",
    "PagedRows",
    "add_rms_norm",
    "embed_norm_rope",
    "linear",
    "qk_norm_rope",
    "quantize",
    "rope_tables",
    "silu_mul",
]

OP = "unfused layers"
LINEAR = "batch-invariant products"

# Shape letters: R rows of all requests, C rows of context before them, V vocabulary, E hidden, I intermediate, L
# layers, Hq/Hkv query and K/V heads, D head size.


def _implementation(x: Tensor, op: str = OP) -> ModuleType:
    if dispatch.pick(op, x, loaded=True) is Implementation.REFERENCE:
        return reference
    from d2sd.plugins.layer_ops.triton import launch

    return launch


def add_rms_norm(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    total: Tensor | None = None,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    block: int = 0,
    offset: bool = False,
) -> Tensor:
    """RMSNorm of x + branch, rows [R, E]; x may be strided by row.

    Args:
        branch: [R, E], None: nothing is added.
        weight: [E].
        total: [R, E], strided by row; receives the sum, may be x. None: the sum is not stored.
        scale: 0-dim fp32; with it the result is quantized, fp8(norm / scale).
        out: [R, E], contiguous, of the result's type; receives the result. None: a new tensor.
        block: rows of a block, of which the first is left out, so the result has R - R / block rows; without `total`.
            0: no row is left out.
        offset: the norm is times 1 + weight, and rounded once.
    """
    given = x, branch, weight, eps
    options = {"total": total, "scale": scale, "out": out, "block": block, "offset": offset}
    normed: Tensor = _implementation(x).add_rms_norm(*given, **options)
    return normed


def qk_norm_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, k: Tensor, v: Tensor, paged: PagedRows | None = None
) -> Tensor:
    """Queries, keys and values of a product, normed and rotated, for one layer or (keys and values) for several.

    Args:
        qkv: [L, R, (Hq + 2·Hkv)·D], in the order q, k, v, and Hq·D more where `heads.gated`; fp32 sums of FP8 values
            where `heads.scales`.
        cos, sin: [R, D/2], or half of `heads.rotary`, by `rope_tables`. Their type is the result's.
        k, v: [L, R, Hkv, D], receive rotated keys and plain values, rounded to FP8 pages' values where `heads.k_scale`.
            They may be strided by layer.
        paged: of one layer; its rows, which are the first, go to these pages, and theirs in k and v are undefined.

    Returns:
        [R, Hq, D]; L is 1 where Hq is not 0.
    """
    out: Tensor = _implementation(qkv).qk_norm_rope(qkv, cos, sin, heads, k, v, paged)
    return out


def silu_mul(
    gate_up: Tensor,
    dtype: torch.dtype,
    *,
    scales: Tensor | None = None,
    scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """silu(gate) * up of [R, 2·I], gate first -> [R, I].

    Args:
        dtype: the model's, in which gate, silu(gate) and the result are rounded.
        scales: [2] fp32 of an FP8 product's sums, of gate and of up.
        scale: 0-dim fp32; with it the result is quantized.
        out: [R, I], contiguous, of the result's type; receives the result. None: a new tensor.
    """
    gated: Tensor = _implementation(gate_up).silu_mul(gate_up, dtype, scales=scales, scale=scale, out=out)
    return gated


def rope_tables(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype, front: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions · frequencies, times `factor`: [..., ] and [D/2] fp32 -> [R, D/2] each in `dtype`.

    Angles are fp32 whatever `dtype`. The rows of `front` [...] int64, other positions, come before those.
    """
    out: tuple[Tensor, Tensor] = _implementation(positions).rope_tables(positions, frequencies, factor, dtype, front)
    return out


def embed_norm_rope(
    tokens: Tensor,
    table: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor | Behind,
    frequencies: Tensor,
    factor: float,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    front: Front | None = None,
    offset: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The beginning of a pass over R tokens [...] int64: their embeddings [R, E], the RMSNorm [C + R, E] of the rows of
    `front` and of those, and cosines and sines [C + R, D/2] as `rope_tables` makes them, in the table's type.

    Args:
        table: [V, E]. An id outside of it is an error that a GPU does not report.
        weight: [E], of the norm. The rows of `front` have theirs.
        positions: [...] int64 of the tokens, or what they count from.
        scale: 0-dim fp32; with it the norms are quantized, fp8(norm / scale).
        out: [C + R, E], contiguous, of the norms' type; receives them. None: a new tensor.
        offset: as of `add_rms_norm`.
    """
    given = tokens, table, weight, eps, positions, frequencies, factor
    made: tuple[Tensor, Tensor, Tensor, Tensor]
    made = _implementation(tokens).embed_norm_rope(*given, scale=scale, out=out, front=front, offset=offset)
    return made


def quantize(x: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """fp8(x / scale), any shape; `d2sd.plugins.shared.fp8.to_pages` of a scalar scale in one kernel.

    `out`, contiguous, receives the result. None: a new tensor.
    """
    quantized: Tensor = _implementation(x).quantize(x, scale, out)
    return quantized


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x Wᵀ + bias: x [..., in], W [out, in] of its type, bias [out] of the result's -> [..., out].

    Batch-invariant: a row's result is the same bits whatever other rows there are. Sums are fp32, in one order over
    the inputs. bf16, fp16, fp32 (IEEE products, no TF32) and FP8.

    Args:
        scales: 0-dim fp32, of x and of W, FP8 only: their product scales the sums.
        dtype: of the result; by default x's.
    """
    out: Tensor = _implementation(x, LINEAR).linear(x, weight, bias, scales, dtype or x.dtype)
    return out
