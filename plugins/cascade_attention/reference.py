"""Cascade attention: T new rows of a request share its committed context and see each other through a mask.

One primitive serves every pass: prefill, plain decoding, both drafts and verification. For one request:

                      keys
             committed context (pages)   new rows
    queries  ┌──────────────────────────┬───────────┐
    new      │ all ones: every row sees │ attn_mask │   attn_mask = causal chain   prefill
    rows     │ all `context_len` tokens │ [T, T]    │               all ones       first draft
             └──────────────────────────┴───────────┘               block diagonal second draft
                                                                    ancestors      verification

This file is the specification and the CPU path: plain PyTorch, one softmax over both parts, in fp32.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention.arguments import OP, ChunkMask, PagedContext, move_broken
from d2sd.plugins.cascade_attention.cpu import takes
from d2sd.plugins.cascade_attention.mask import AttnMask
from d2sd.plugins.dispatch import LIBRARY, REFERENCE, Implementation, op, pick
from d2sd.plugins.shared.fp8 import from_pages, stored

# Shape letters: B requests, T new rows, Hq/Hkv query and K/V heads, D head size, P pages in the pool,
# Z tokens a page, M pages a request in this call (its bucket), S = M·Z context slots.


def _picked(
    q: Tensor, k: Tensor, v: Tensor, context: PagedContext, *_: object, exact: bool = False, **__: object
) -> Implementation:
    picked = pick(OP, context.k_pages, pages=True, loaded=exact)
    library = exact and picked is REFERENCE and takes(q, context)
    return LIBRARY if library else picked


@op(OP, launcher="attend", picked=_picked)
def cascade_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PagedContext,
    attn_mask: Tensor | AttnMask | ChunkMask,
    *,
    sinks: Tensor | None = None,
    scale: Tensor | None = None,
    exact: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of T new rows over their request's paged context and, through a mask, over each other.

    Chunks of prompts (`ChunkMask`) have q, k and v [1, N, ...] over a context of B requests.

    Args:
        q: [B, T, Hq, D], rotated. Query head h reads K/V head h // (Hq / Hkv).
        k, v: [B, T, Hkv, D], the new rows' own keys (rotated) and values; they are not in the pages yet. For FP8 pages
            they are in q's dtype too, but already rounded to what such pages can hold.
        context: committed K/V of this layer.
        attn_mask: [B, T, T] bool, row t may attend to row u. Layers that share a mask pass one `AttnMask` of it, which
            is packed for the kernel once.
        sinks: [Hq], a logit for each query head that takes part in its softmax and has no value.
        scale: 0-dim fp32; with it the result is quantized, fp8(out / scale).
        exact: batch-invariant: a row's result is the same bits whatever else is computed, and wherever in pages, a
            tree or a chunk its keys are. On CUDA the model was fused, so that the device is known to run it; on a CPU
            it needs the compiled library, heads that it takes and pages of q's type, and is not had otherwise.
        out: [B, T, Hq, D], contiguous, of the result's type; receives the result unless `exact`. None: a new tensor.

    Returns:
        [B, T, Hq, D] in q's dtype or FP8 (E4M3); scores are scaled by D^-0.5.

    Raises:
        D2SDError: the tensors are on a CUDA device whose kernel does not take them, under `D2SD_NO_FALLBACK=1`.
    """
    mask = AttnMask(attn_mask) if isinstance(attn_mask, Tensor) else attn_mask
    if isinstance(mask, ChunkMask):
        return stored(_chunks(q, k, v, context, mask, sinks), scale, out)
    return stored(_rows(q, k, v, context, mask, sinks), scale, out)


def _rows(q: Tensor, k: Tensor, v: Tensor, context: PagedContext, mask: AttnMask, sinks: Tensor | None) -> Tensor:
    """The rows of trees.

    Slots at or past `context_len`, and those in front of every row's `first`, are never read into a score, whatever
    they hold (NaN included), and neither are new rows that a row does not see. A row that sees a value that is not
    finite turns to NaN, and so does one that may attend to nothing: padding rows attend to themselves.
    """
    batch, rows, heads, size = q.shape
    first = mask.first
    kv_heads = k.shape[2]
    slots = context.page_table.shape[1] * context.k_pages.shape[1]

    in_context = torch.arange(slots, device=q.device) < context.context_len[:, None]  # [B, S]
    seen = in_context[:, None, :].expand(batch, rows, slots)
    if first is not None:
        seen = seen & (torch.arange(slots, device=q.device) >= first[..., None])
    hidden = torch.cat([~seen, ~mask.allowed], dim=2)  # [B, T, S+T]

    def gathered(pages: Tensor, new: Tensor, scale: Tensor | None) -> Tensor:
        """[Hkv, B, S+T, D] in fp32. Whole pages are copied first: many times faster on a CPU than token by token."""
        out = q.new_empty((kv_heads, batch, slots + rows, size), dtype=torch.float32)
        old = pages.flatten(1).index_select(0, context.page_table.flatten())
        if scale is not None:
            old = from_pages(old, scale, q.dtype)
        out[:, :, :slots] = old.view(batch, slots, kv_heads, size).permute(2, 0, 1, 3)
        out[:, :, slots:] = new.permute(2, 0, 1, 3)
        return out

    keys = gathered(context.k_pages, k, context.k_scale)
    values = gathered(context.v_pages, v, context.v_scale)
    move_broken(keys, values)
    # All query heads of one K/V head become rows of one matrix: GQA without copying K or V.
    group = heads // kv_heads
    q_rows = q.float().reshape(batch, rows, kv_heads, group, size).permute(2, 0, 3, 1, 4)
    q_rows = q_rows.reshape(kv_heads, batch, group * rows, size)
    scores = (q_rows @ keys.transpose(2, 3) * size**-0.5).view(kv_heads, batch, group, rows, -1)
    scores = scores.masked_fill_(hidden[:, None], float("-inf"))
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sink = sinks.float().view(kv_heads, 1, group, 1, 1).expand(-1, batch, -1, rows, -1)
        weights = torch.cat([scores, sink], -1).softmax(dim=-1)[..., :-1]
    out: Tensor = (weights.view(kv_heads, batch, group * rows, -1) @ values).view(kv_heads, batch, group, rows, size)
    return out.permute(1, 3, 0, 2, 4).reshape(batch, rows, heads, size).to(q.dtype)


def _chunks(q: Tensor, k: Tensor, v: Tensor, context: PagedContext, chunks: ChunkMask, sinks: Tensor | None) -> Tensor:
    """Chunks [1, N, ...], one request after the other."""
    if not chunks.known:
        return _chunks_of_device(q, k, v, context, chunks, sinks)
    parts = []
    for span, alone in zip(chunks.spans(), chunks.alone(q, k, v, context), strict=True):
        length, first = span.stop - span.start, None
        mask = torch.ones(1, length, length, dtype=torch.bool, device=q.device).tril()
        if chunks.first is not None:
            first = chunks.first[None, span]
            positions = alone[-1].context_len + torch.arange(length, device=q.device)
            mask = mask & (positions >= first[..., None])
        parts.append(_rows(*alone, AttnMask(mask, first), sinks))
    return torch.cat(parts, 1)


def _chunks_of_device(
    q: Tensor, k: Tensor, v: Tensor, context: PagedContext, chunks: ChunkMask, sinks: Tensor | None
) -> Tensor:
    """`_chunks` by operators whose shapes do not depend on the chunks: all rows behind the context of each
    request in turn, of which its own are kept.
    """
    rows = torch.arange(q.shape[1], device=q.device)
    of_row = torch.searchsorted(chunks.starts[1:].contiguous(), rows, right=True)
    causal = (of_row[:, None] == of_row) & (rows[:, None] >= rows)
    out = torch.zeros_like(q)
    for request in range(len(chunks.starts) - 1):
        row, first = slice(request, request + 1), None
        alone = replace(context, page_table=context.page_table[row], context_len=context.context_len[row])
        mask = causal[None]
        if chunks.first is not None:
            first = chunks.first[None]
            positions = alone.context_len + rows - chunks.starts[row]
            mask = mask & (positions >= first[..., None])
        found = _rows(q, k, v, alone, AttnMask(mask, first), sinks)
        out = torch.where((of_row == request)[None, :, None, None], found, out)
    return out
