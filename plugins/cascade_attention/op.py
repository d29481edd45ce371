"""Cascade attention: T new rows of a request share its committed context and see each other through a mask.

One primitive serves every pass (DESIGN: prefill, plain decoding, both drafts, verification). For one request:

                      keys
             committed context (pages)   new rows
    queries  ┌──────────────────────────┬───────────┐
    new      │ all ones: every row sees │ visible   │   visible = causal chain   prefill
    rows     │ all `context_len` tokens │ [T, T]    │             all ones       first draft
             └──────────────────────────┴───────────┘             block diagonal second draft
                                                                  ancestors      verification

This file is the specification and the CPU path: plain PyTorch, one softmax over both parts, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    visible: Tensor,
) -> Tensor:
    """Attention of new rows over a shared paged context plus a masked tile among the rows themselves.

    Args:
        q: [B, T, Hq, D], rotated. Query head h reads K/V head h // (Hq / Hkv).
        k, v: [B, T, Hkv, D], the new rows' own keys (rotated) and values; they are not in the pages yet.
        k_pages, v_pages: [P, Z, Hkv, D], the pool of one layer.
        page_table: [B, M] int64, page of each Z tokens of context; entries past the context may be anything in [0, P).
        context_len: [B] int64, committed tokens, at most M·Z.
        visible: [B, T, T] bool, row t may read row u. Padding rows must see themselves: a row
            that sees nothing turns to NaN, and its NaN K/V would reach the other rows in the next layer.

    Returns:
        [B, T, Hq, D] in q's dtype. Scores are scaled by D^-0.5. Slots at or past `context_len` are never read into a
        score, whatever they hold (NaN included).
    """
    batch, rows, heads, size = q.shape
    kv_heads = k.shape[2]
    context = page_table.shape[1] * k_pages.shape[1]

    in_context = torch.arange(context, device=q.device) < context_len[:, None]  # [B, S]
    seen = torch.cat([in_context[:, None, :].expand(batch, rows, context), visible], dim=2)  # [B, T, S+T]

    def keys_of(pages: Tensor, new: Tensor) -> Tensor:
        """[B, Hkv, S+T, D] in fp32; unused slots are zeroed because 0 · NaN is NaN."""
        old = pages[page_table].reshape(batch, context, kv_heads, size)
        old = old.masked_fill(~in_context[:, :, None, None], 0)
        return torch.cat([old, new], dim=1).transpose(1, 2).float()

    # All query heads of one K/V head become rows of one matrix: GQA without copying K or V.
    group = heads // kv_heads
    q_rows = q.float().reshape(batch, rows, kv_heads, group, size).permute(0, 2, 3, 1, 4)
    q_rows = q_rows.reshape(batch, kv_heads, group * rows, size)
    scores = q_rows @ keys_of(k_pages, k).transpose(2, 3) * size**-0.5  # [B, Hkv, G·T, S+T]
    scores = scores.view(batch, kv_heads, group, rows, -1).masked_fill(~seen[:, None, None], float("-inf"))
    weights = scores.softmax(dim=-1).view(batch, kv_heads, group * rows, -1)
    out: Tensor = (weights @ keys_of(v_pages, v)).view(batch, kv_heads, group, rows, size)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, rows, heads, size).to(q.dtype)
