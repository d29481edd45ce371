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
from torch.nn import functional as F

from d2sd.plugins.cascade_attention.arguments import ChunkMask, PagedContext, move_broken
from d2sd.plugins.shared.fp8 import from_pages

#: Columns a word of a packed mask.
WORD = 32

# Shape letters: B requests, T new rows, Hq/Hkv query and K/V heads, D head size, P pages in the pool,
# Z tokens a page, M pages a request in this call (its bucket), S = M·Z context slots.


def cascade_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PagedContext,
    attn_mask: Tensor,
    first: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`cascade_attention` with `attn_mask` [B, T, T] bool, on any device; `first` as in `AttnMask`.

    Slots at or past `context_len`, and those in front of every row's `first`, are never read into a score, whatever
    they hold (NaN included), and neither are new rows that a row does not see. A row that sees a value that is not
    finite turns to NaN, and so does one that may attend to nothing: padding rows attend to themselves.
    """
    batch, rows, heads, size = q.shape
    kv_heads = k.shape[2]
    slots = context.page_table.shape[1] * context.k_pages.shape[1]

    in_context = torch.arange(slots, device=q.device) < context.context_len[:, None]  # [B, S]
    seen = in_context[:, None, :].expand(batch, rows, slots)
    if first is not None:
        seen = seen & (torch.arange(slots, device=q.device) >= first[..., None])
    hidden = torch.cat([~seen, ~attn_mask], dim=2)  # [B, T, S+T]

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


def chunks_reference(
    q: Tensor, k: Tensor, v: Tensor, context: PagedContext, chunks: ChunkMask, sinks: Tensor | None = None
) -> Tensor:
    """`cascade_attention` of chunks [1, N, ...], one request after the other."""
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
        parts.append(cascade_attention_reference(*alone, mask, first, sinks))
    return torch.cat(parts, 1)


def _chunks_of_device(
    q: Tensor, k: Tensor, v: Tensor, context: PagedContext, chunks: ChunkMask, sinks: Tensor | None
) -> Tensor:
    """`chunks_reference` by operators whose shapes do not depend on the chunks: all rows behind the context of each
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
        found = cascade_attention_reference(q, k, v, alone, mask, first, sinks)
        out = torch.where((of_row == request)[None, :, None, None], found, out)
    return out


def pack_mask_reference(attn_mask: Tensor) -> Tensor:
    """`pack_mask_bits` on any device: attn_mask[b, t, u] is bit u % 32 of word [b, t, u // 32]; bits past T are 0."""
    padded = F.pad(attn_mask, (0, -attn_mask.shape[2] % WORD))
    bits = padded.view(*attn_mask.shape[:2], -1, WORD).int()
    shifts = torch.arange(WORD, device=attn_mask.device, dtype=torch.int32)
    # Bits are disjoint, so the sum is their union; the highest one is the sign.
    return (bits << shifts).sum(-1, dtype=torch.int32)
