"""The rows' mask as the kernels read it: one bit a pair, 32 columns a word.

    attn_mask[b, t, u]  ->  bit u % 32 of word [b, t, u // 32]        bits past T are 0

Packed once per forward pass (`KVPool.attend`), not per layer: it is the same in all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

#: Columns a word.
WORD = 32


def pack_mask_bits(attn_mask: Tensor) -> Tensor:
    """[B, T, T] bool -> [B, T, ceil(T/32)] int32."""
    padded = F.pad(attn_mask, (0, -attn_mask.shape[2] % WORD))
    bits = padded.view(*attn_mask.shape[:2], -1, WORD).int()
    places = torch.arange(WORD, device=attn_mask.device, dtype=torch.int32)
    # Bits are disjoint, so the sum is their union; the highest one is the sign.
    return (bits << places).sum(-1, dtype=torch.int32)
