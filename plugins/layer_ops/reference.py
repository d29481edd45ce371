"""The ops of this folder in plain PyTorch: their specification, and their CPU path.

Every rounding stands where `modeling/layers.py`, `rope.py` and `fp8.py` round.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.plugins.cascade_attention.arguments import move_broken
from d2sd.plugins.dispatch import op
from d2sd.plugins.kv_pages import write_pages
from d2sd.plugins.layer_ops.types import Behind, Front, Heads, PagedRows
from d2sd.plugins.shared.fp8 import from_pages, stored, to_pages

# Shape letters as in __init__.py.

OP = "unfused layers"
LINEAR = "batch-invariant products"


@op(OP, loaded=True)
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
    if block:
        x, branch = _behind_first(x, block), None if branch is None else _behind_first(branch, block)
    if branch is not None:
        x = x + branch
        if total is not None:
            total.copy_(x)
    return stored(_scaled(x, weight, eps, offset), scale, out)


def _behind_first(x: Tensor, block: int) -> Tensor:
    return x.reshape(-1, block, x.shape[1])[:, 1:].flatten(0, 1)


def _scaled(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (1 + weight.float())).to(x.dtype) if offset else weight * normed.to(x.dtype)


@op(OP, loaded=True)
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
    dtype = cos.dtype
    parts = list(torch.split(qkv, heads.parts, -1))
    if heads.scales is not None:
        parts = [part * scale[:, None, None] for part, scale in zip(parts, heads.scales.unbind(1), strict=True)]
    parts = [part.to(dtype) for part in parts]
    if heads.bias is not None:
        biases = torch.split(heads.bias, heads.parts, -1)
        parts = [part + bias[:, None] for part, bias in zip(parts, biases, strict=True)]
    queries, keys, values = (
        part.view(*part.shape[:2], part.shape[2] // heads.size, heads.size) for part in parts
    )  # [L, R, H, D]
    queries = queries[:, :, ::2] if heads.gated else queries
    if heads.q_norm is not None:
        queries = _scaled(queries, heads.q_norm, heads.eps, heads.norm_offset)
    if heads.k_norm is not None:
        keys = _scaled(keys, heads.k_norm[:, None, None], heads.eps, heads.norm_offset)
    keys = _rotated(keys, cos, sin)
    if heads.k_scale is not None:
        assert heads.v_scale is not None
        keys, values = (
            from_pages(to_pages(x, scale.view(-1, 1, 1, 1)), scale.view(-1, 1, 1, 1), dtype)
            for x, scale in ((keys, heads.k_scale), (values, heads.v_scale))
        )
    k.copy_(keys)
    v.copy_(values)
    move_broken(k, v)
    if paged is not None:
        rows = paged.keep.numel()
        new_k, new_v = (x[:, :rows].view(1, *paged.keep.shape, *x.shape[2:]) for x in (k, v))
        write_pages(
            new_k,
            new_v,
            paged.k_pages[None],
            paged.v_pages[None],
            paged.page_table,
            paged.positions,
            paged.keep,
            k_scale=heads.k_scale,
            v_scale=heads.v_scale,
        )
    return _rotated(queries, cos, sin)[0]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [L, R, H, D] by tables [R, D/2], or the first numbers of each head by shorter ones."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos + -second * sin, second * cos + first * sin, rest], dim=-1)


@op(OP, loaded=True)
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
    gate, up = gate_up.chunk(2, dim=-1)
    if scales is not None:
        gate, up = gate * scales[0], up * scales[1]
    return stored(F.silu(gate.to(dtype)) * up.to(dtype), scale, out)


@op(OP, loaded=True)
def rope_tables(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype, front: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions · frequencies, times `factor`: [..., ] and [D/2] fp32 -> [R, D/2] each in `dtype`.

    Angles are fp32 whatever `dtype`. The rows of `front` [...] int64, other positions, come before those.
    """
    every = positions.flatten() if front is None else torch.cat([front.flatten(), positions.flatten()])
    angles = every[:, None].float() * frequencies
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


@op(OP, loaded=True)
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
    x = F.embedding(tokens.flatten(), table)
    normed = add_rms_norm.reference(x, None, weight, eps, scale=scale, offset=offset)
    if front is not None:
        of_front = add_rms_norm.reference(front.x, None, front.weight, eps, scale=scale, offset=offset)
        normed = torch.cat([of_front, normed])
    before = None if front is None else front.positions
    absolute = positions.absolute if isinstance(positions, Behind) else positions
    cos, sin = rope_tables.reference(absolute, frequencies, factor, table.dtype, before)
    return x, normed if out is None else out.copy_(normed), cos, sin


@op(OP, loaded=True)
def quantize(x: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """fp8(x / scale), any shape; `d2sd.plugins.shared.fp8.to_pages` of a scalar scale in one kernel.

    `out`, contiguous, receives the result. None: a new tensor.
    """
    return stored(x, scale, out)


@op(LINEAR, launcher="products", loaded=True)
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x Wᵀ + bias: x [..., in], W [out, in] of its type, bias [out] of the result's -> [..., out].

    Batch-invariant: a row's result is the same bits whatever other rows there are. Sums are fp32, in one order over
    the inputs. bf16, fp16, fp32 (IEEE products, no TF32) and FP8.

    Args:
        scales: 0-dim fp32, of x and of W, FP8 only: their product scales the sums.
        dtype: of the result; by default x's.

    This specification does not say in which order sums run. They are scaled, biased and rounded once; FP8 products are
    rounded before the bias, as `Fp8Linear` does.
    """
    dtype = dtype or x.dtype
    wide = F.linear(x.float(), weight.float())
    if scales is not None:
        wide = (wide * (scales[0] * scales[1])).to(dtype).float()
    return (wide if bias is None else wide + bias.float()).to(dtype)


#: Of whose multiples W's outputs and inputs must be for `split_linear`.
SPLIT_STEP = 128


@op(LINEAR, launcher="products", loaded=True)
def split_linear(
    x: Tensor,
    weight: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """x Wᵀ of 16 bits or FP8 as `linear` has it, batch-invariant too, by a kernel that is for few rows.

    It sums shares of the inputs side by side, and adds those in fp32, first to last; W's shape says how many there are.

    Args:
        arrived: for the kernel, zeros [at least out / SPLIT_STEP] int32 that are zeros again afterwards, for calls that
            run in order; without, a call makes its own.
    """
    return linear.reference(x, weight, None, scales, dtype)
