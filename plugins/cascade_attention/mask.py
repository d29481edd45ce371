"""The mask among the rows of a pass, and its packed form for the kernels.

    attn_mask[b, t, u]  ->  bit u % 32 of word [b, t, u // 32]

Bits past T are 0. Chunks of prompts have no mask (chunks.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.plugins import dispatch
from d2sd.plugins.cascade_attention.chunks import counters
from d2sd.plugins.dispatch import Implementation

#: Columns a word.
WORD = 32


@dataclass(frozen=True)
class AttnMask:
    """The mask of one pass, shared by its layers, which run in order: packed once, and only if a kernel runs."""

    allowed: Tensor  # [B, T, T] bool, row t may attend to row u. Every row, padding too, must attend to itself

    @cached_property
    def words(self) -> Tensor:
        """[B, T, ceil(T/32)] int32."""
        return pack_mask_bits(self.allowed)

    @cached_property
    def order(self) -> Tensor:
        """[B, T, T + 1] int32 for the kernel of `exact`: the columns that each row sees, in their order, and how many.

        In a tree the n-th of them is the key at position context_len + n. The other numbers are undefined.
        """
        from d2sd.plugins.cascade_attention.triton.exact import key_order_triton

        return key_order_triton(self.allowed)

    @cached_property
    def arrived(self) -> Tensor:
        """Zeroed split counters, shared by the layers of a pass."""
        return counters(self.allowed.device)


def pack_mask_bits(attn_mask: Tensor) -> Tensor:
    """[B, T, T] bool -> [B, T, ceil(T/32)] int32; on CUDA in one kernel."""
    if dispatch.pick("attention", attn_mask, loaded=True) is Implementation.TRITON:
        from d2sd.plugins.cascade_attention.triton.launch import pack_mask_triton

        return pack_mask_triton(attn_mask)
    return pack_mask_reference(attn_mask)


def pack_mask_reference(attn_mask: Tensor) -> Tensor:
    """`pack_mask_bits` on any device."""
    padded = F.pad(attn_mask, (0, -attn_mask.shape[2] % WORD))
    bits = padded.view(*attn_mask.shape[:2], -1, WORD).int()
    shifts = torch.arange(WORD, device=attn_mask.device, dtype=torch.int32)
    # Bits are disjoint, so the sum is their union; the highest one is the sign.
    return (bits << shifts).sum(-1, dtype=torch.int32)
