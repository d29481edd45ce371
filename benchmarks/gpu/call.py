"""Random calls of cascade attention on any device, the specification's result for them, and the error bounds."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from benchmarks.gpu.shapes import PAGE_SIZE, Shape
from d2sd.plugins.cascade_attention import PagedContext, cascade_attention
from d2sd.plugins.shared.fp8 import from_pages, to_pages
from tests.plugins.cascade_attention.cases import BUDGET

# Shape letters as in plugins/cascade_attention/reference.py.

#: Largest ‖found - expected‖ / ‖expected‖: over thousands of random keys a result is so small that zeros would keep the
#: tests' `BUDGET`.
RELATIVE = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


class Wrong(Exception):
    """A result differs from the reference."""


@dataclass(frozen=True)
class Call:
    """The op's arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    context: PagedContext
    attn_mask: Tensor

    def tensors(self) -> list[Tensor]:
        """All of them, in a fixed order."""
        paged = [getattr(self.context, field.name) for field in fields(self.context)]
        return [x for x in (self.q, self.k, self.v, *paged, self.attn_mask) if x is not None]


def make_call(shape: Shape, device: str) -> Call:
    """Random numbers, pages in random order, another tree for every request; slots that no token owns hold NaN."""
    draw = torch.Generator(device).manual_seed(0)
    batch, columns, token = len(shape.contexts), shape.columns, (shape.kv_heads, shape.size)
    table = 1 + torch.randperm(batch * columns, generator=draw, device=device).view(batch, columns)
    length = torch.tensor(shape.contexts, device=device)
    owned = (torch.arange(shape.slots, device=device) < length[:, None]).view(batch, columns, PAGE_SIZE, 1, 1)
    scales = [torch.tensor(scale, device=device) if shape.fp8 else None for scale in (0.011, 0.009)]

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw, device=device, dtype=shape.dtype)

    def pool(scale: Tensor | None) -> Tensor:
        kind = torch.float8_e4m3fn if shape.fp8 else shape.dtype
        pages = torch.full((1 + batch * columns, PAGE_SIZE, *token), torch.nan, device=device).to(kind)
        filled = numbers(batch, columns, PAGE_SIZE, *token).masked_fill_(~owned, torch.nan)
        if scale is None:
            pages[table] = filled
        else:  # index_put does not support FP8
            pages.view(torch.uint8)[table] = to_pages(filled, scale).view(torch.uint8)
        return pages

    def new(scale: Tensor | None) -> Tensor:
        rows = numbers(batch, shape.rows, *token)
        return rows if scale is None else from_pages(to_pages(rows, scale), scale, shape.dtype)

    return Call(
        numbers(batch, shape.rows, shape.heads, shape.size),
        new(scales[0]),
        new(scales[1]),
        PagedContext(pool(scales[0]), pool(scales[1]), table, length, *scales),
        trees(batch, shape.rows).to(device),
    )


def trees(batch: int, rows: int) -> Tensor:
    """[B, T, T] bool: ancestors and itself, in random trees; a parent is one of the eight rows before."""
    draw = torch.Generator().manual_seed(0)
    back = 1 + torch.randint(0, 8, (batch, rows), generator=draw)
    attn_mask = torch.eye(rows, dtype=torch.bool).repeat(batch, 1, 1)
    every = torch.arange(batch)
    for row in range(1, rows):
        attn_mask[:, row] |= attn_mask[every, (row - back[:, row]).clamp(min=0)]
    return attn_mask


def reference(call: Call, request: int) -> Tensor:
    """[1, T, Hq, D] of one request by the specification, in fp32 inside."""
    one = slice(request, request + 1)
    context = replace(call.context, page_table=call.context.page_table[one], context_len=call.context.context_len[one])
    return cascade_attention.reference(call.q[one], call.k[one], call.v[one], context, call.attn_mask[one])


def compare(found: Tensor, call: Call, attn_mask: Tensor | None = None) -> dict[str, float]:
    """Errors of a result [B, T, Hq, D]; raises `Wrong` past the bounds.

    Of a large batch the first and the last request are looked at. `attn_mask` replaces the call's own mask.
    """
    used = call if attn_mask is None else replace(call, attn_mask=attn_mask)
    assert found.dtype == call.q.dtype, found.dtype
    v_pages, v_scale = call.context.v_pages, call.context.v_scale
    scale = 1.0 if v_scale is None else float(v_scale)
    largest = max(
        float(call.v.abs().max()), float(v_pages.to(torch.float32, copy=True).nan_to_num_(0).abs_().max()) * scale
    )
    budget, relative = 0.0, 0.0
    batch = len(call.q)
    for request in range(batch) if batch <= 8 else (0, batch - 1):
        expected, got = reference(used, request).double(), found[request : request + 1].double()
        error = got - expected
        if not error.isfinite().all():
            raise Wrong("the result is not finite")
        budget = max(budget, float(error.abs().max()) / (BUDGET[found.dtype] * largest))
        relative = max(relative, float(error.norm() / expected.norm()) / RELATIVE[found.dtype])
    errors = {"error_of_budget": round(budget, 4), "relative_error_of_budget": round(relative, 4)}
    if budget > 1 or relative > 1:
        raise Wrong(f"past the bounds: {errors}")
    return errors
