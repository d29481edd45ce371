"""Cascade attention: T new rows of a request share its committed context and see each other through a mask.

One primitive serves every pass (DESIGN: prefill, plain decoding, both drafts, verification). For one request:

                      keys
             committed context (pages)   new rows
    queries  ┌──────────────────────────┬───────────┐
    new      │ all ones: every row sees │ attn_mask   │   attn_mask = causal chain   prefill
    rows     │ all `context_len` tokens │ [T, T]    │             all ones       first draft
             └──────────────────────────┴───────────┘             block diagonal second draft
                                                                  ancestors      verification

This file is the specification and the CPU path: plain PyTorch, one softmax over both parts, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins.fp8 import from_pages

# Shape letters: B requests, T new rows, Hq/Hkv query and K/V heads, D head size, P pages in the pool,
# Z tokens a page, M pages a request in this call (its bucket), S = M·Z context slots.


def cascade_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    context_len: Tensor,
    attn_mask: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attention of new rows over a shared paged context plus a masked tile among the rows themselves.

    Args:
        q: [B, T, Hq, D], rotated. Query head h reads K/V head h // (Hq / Hkv).
        k, v: [B, T, Hkv, D], the new rows' own keys (rotated) and values; they are not in the pages yet.
        k_pages, v_pages: [P, Z, Hkv, D], the pool of one layer.
        page_table: [B, M] int64, page of each Z tokens of context; entries past the context may be anything in [0, P).
        context_len: [B] int64, committed tokens, at most M·Z.
        attn_mask: [B, T, T] bool, row t may read row u. Padding rows must see themselves: a row
            that sees nothing turns to NaN, and its NaN K/V would reach the other rows in the next layer.
        k_scale, v_scale: 0-dim fp32, of FP8 (E4M3) pages only. k and v come unquantized in q's dtype, rounded by the
            caller as such pages would round them, so that a row reads the same before and after its commit.

    Returns:
        [B, T, Hq, D] in q's dtype. Scores are scaled by D^-0.5. Slots at or past `context_len` are never read into a
        score, whatever they hold (NaN included).
    """
    batch, rows, heads, size = q.shape
    kv_heads = k.shape[2]
    context = page_table.shape[1] * k_pages.shape[1]

    in_context = torch.arange(context, device=q.device) < context_len[:, None]  # [B, S]
    hidden = torch.cat([~in_context[:, None, :].expand(batch, rows, context), ~attn_mask], dim=2)  # [B, T, S+T]

    def gathered(pages: Tensor, new: Tensor, scale: Tensor | None) -> Tensor:
        """[Hkv, B, S+T, D] in fp32. Whole pages are copied first: many times faster on a CPU than token by token."""
        out = q.new_empty((kv_heads, batch, context + rows, size), dtype=torch.float32)
        old = pages.flatten(1).index_select(0, page_table.flatten())
        if scale is not None:
            old = from_pages(old, scale, q.dtype)
        out[:, :, :context] = old.view(batch, context, kv_heads, size).permute(2, 0, 1, 3)
        out[:, :, context:] = new.permute(2, 0, 1, 3)
        return out

    keys, values = gathered(k_pages, k, k_scale), gathered(v_pages, v, v_scale)
    values[:, :, :context].masked_fill_(~in_context[:, :, None], 0)  # a weight of 0 times NaN would be NaN
    # All query heads of one K/V head become rows of one matrix: GQA without copying K or V.
    group = heads // kv_heads
    q_rows = q.float().reshape(batch, rows, kv_heads, group, size).permute(2, 0, 3, 1, 4)
    q_rows = q_rows.reshape(kv_heads, batch, group * rows, size)
    scores = (q_rows @ keys.transpose(2, 3) * size**-0.5).view(kv_heads, batch, group, rows, -1)
    weights = scores.masked_fill_(hidden[:, None], float("-inf")).softmax(dim=-1)
    out: Tensor = (weights.view(kv_heads, batch, group * rows, -1) @ values).view(kv_heads, batch, group, rows, size)
    return out.permute(1, 3, 0, 2, 4).reshape(batch, rows, heads, size).to(q.dtype)
