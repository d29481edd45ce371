"""What every forward pass is told about its rows, and the paged K/V they read and join."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from d2sd.modeling.layers import Attend
from d2sd.plugins.cascade_attention import cascade_attention
from d2sd.plugins.cascade_attention.mask import pack_mask_bits
from d2sd.plugins.dispatch import use_triton
from d2sd.plugins.kv_pages import write_rows

# Shape letters: B requests, T rows, M pages a request, Z tokens a page, P pages, L layers, Hkv heads, D head size.


@dataclass(frozen=True, slots=True)
class Rows:
    """B requests, each with T new rows over its committed context."""

    positions: Tensor  # [B, T] int64, absolute position of each row: in a tree, context length + depth
    attn_mask: Tensor  # [B, T, T] bool, row t may read row u
    page_table: Tensor  # [B, M] int64
    context_len: Tensor  # [B] int64, committed tokens

    @staticmethod
    def chain(length: int, page_table: Tensor, context_len: Tensor) -> Rows:
        """Rows that follow the context one after the other, each seeing those before it: a prefill chunk."""
        steps = torch.arange(length, device=context_len.device)
        attn_mask = (steps[:, None] >= steps).expand(len(context_len), length, length)
        return Rows(context_len[:, None] + steps, attn_mask, page_table, context_len)


class KVPool:
    """Paged keys and values of one model. It holds committed tokens only; page 0 takes the writes of padding."""

    def __init__(
        self, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
    ) -> None:
        shape = (layers, pages, page_size, kv_heads, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)  # [L, P, Z, Hkv, D]
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.page_size = page_size

    def write(
        self, k: Tensor, v: Tensor, page_table: Tensor, positions: Tensor, keep: Tensor, path: Tensor | None = None
    ) -> None:
        """Commit rows: k, v [L, B, T, Hkv, D] go to token `positions [B, T]`, at most one kept row each.

        With a `path [B, N]` row path[b, n] goes to place n, and `positions` and `keep` are [B, N]. Rows not in `keep`,
        and any that the page table does not reach, reach page 0 at most.
        """
        write = write_rows
        if use_triton(self.k):
            from d2sd.plugins.kv_pages.triton.launch import fused_write_rows

            write = fused_write_rows
        write(k, v, self.k, self.v, page_table, positions, keep, path)

    def attend(self, rows: Rows) -> Attend:
        """The attention of `rows` over this pool, layer by layer."""
        attention: Callable[..., Tensor] = cascade_attention
        attn_mask = rows.attn_mask
        if use_triton(self.k):
            from d2sd.plugins.cascade_attention.triton.launch import fused_cascade_attention

            attention, attn_mask = fused_cascade_attention, pack_mask_bits(attn_mask)  # packed once for all layers

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, self.k[index], self.v[index], rows.page_table, rows.context_len, attn_mask)

        return attend
