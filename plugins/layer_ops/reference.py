"""The ops of this folder in plain PyTorch: their specification, and their CPU path.

Every rounding stands where `modeling/layers.py`, `rope.py` and `fp8.py` round.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.plugins.cascade_attention.arguments import move_broken
from d2sd.plugins.kv_pages import write_pages
from d2sd.plugins.layer_ops.heads import Heads, PagedRows
from d2sd.plugins.layer_ops.rows import Behind, Front
from d2sd.plugins.shared.fp8 import from_pages, to_pages

# Shape letters as in __init__.py.


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
    """`d2sd.plugins.layer_ops.add_rms_norm`."""
    if block:
        x, branch = _behind_first(x, block), None if branch is None else _behind_first(branch, block)
    if branch is not None:
        x = x + branch
        if total is not None:
            total.copy_(x)
    normed = _scaled(x, weight, eps, offset)
    result = normed if scale is None else quantize(normed, scale)
    return result if out is None else out.copy_(result)


def _behind_first(x: Tensor, block: int) -> Tensor:
    return x.reshape(-1, block, x.shape[1])[:, 1:].flatten(0, 1)


def _scaled(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (1 + weight.float())).to(x.dtype) if offset else weight * normed.to(x.dtype)


def qk_norm_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, k: Tensor, v: Tensor, paged: PagedRows | None = None
) -> Tensor:
    """`d2sd.plugins.layer_ops.qk_norm_rope`."""
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


def silu_mul(
    gate_up: Tensor,
    dtype: torch.dtype,
    *,
    scales: Tensor | None = None,
    scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`d2sd.plugins.layer_ops.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if scales is not None:
        gate, up = gate * scales[0], up * scales[1]
    gated = F.silu(gate.to(dtype)) * up.to(dtype)
    result = gated if scale is None else quantize(gated, scale)
    return result if out is None else out.copy_(result)


def rope_tables(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype, front: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`d2sd.plugins.layer_ops.rope_tables`."""
    every = positions.flatten() if front is None else torch.cat([front.flatten(), positions.flatten()])
    angles = every[:, None].float() * frequencies
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


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
    """`d2sd.plugins.layer_ops.embed_norm_rope`."""
    x = F.embedding(tokens.flatten(), table)
    normed = add_rms_norm(x, None, weight, eps, scale=scale, offset=offset)
    if front is not None:
        normed = torch.cat([add_rms_norm(front.x, None, front.weight, eps, scale=scale, offset=offset), normed])
    before = None if front is None else front.positions
    absolute = positions.absolute if isinstance(positions, Behind) else positions
    cos, sin = rope_tables(absolute, frequencies, factor, table.dtype, before)
    return x, normed if out is None else out.copy_(normed), cos, sin


def quantize(x: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """`d2sd.plugins.layer_ops.quantize`."""
    result = to_pages(x, scale)
    return result if out is None else out.copy_(result)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, scales: tuple[Tensor, Tensor] | None, dtype: torch.dtype
) -> Tensor:
    """`d2sd.plugins.layer_ops.linear`; it does not say in which order sums run.

    Sums are scaled, biased and rounded once; FP8 products are rounded before the bias, as `Fp8Linear` does.
    """
    wide = F.linear(x.float(), weight.float())
    if scales is not None:
        wide = (wide * (scales[0] * scales[1])).to(dtype).float()
    return (wide if bias is None else wide + bias.float()).to(dtype)
