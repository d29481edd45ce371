"""The rows of a forward pass: their positions, their committed context, and the mask among them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# Shape letters: B requests, T rows, M pages a request.


@dataclass(frozen=True, slots=True)
class Rows:
    """B requests, each with T new rows over its committed context."""

    positions: Tensor  # [B, T] int64, absolute position of each row: in a tree, context length + depth
    attn_mask: Tensor  # [B, T, T] bool, row t may attend to row u
    page_table: Tensor  # [B, M] int64
    context_len: Tensor  # [B] int64, committed tokens
    causal: bool = field(default=False, kw_only=True)  # `attn_mask` is the causal one

    @staticmethod
    def chain(length: int, page_table: Tensor, context_len: Tensor) -> Rows:
        """Consecutive rows after the context under a causal mask: a prefill chunk."""
        steps = torch.arange(length, device=context_len.device)
        attn_mask = (steps[:, None] >= steps).expand(len(context_len), length, length)
        return Rows(context_len[:, None] + steps, attn_mask, page_table, context_len, causal=True)
