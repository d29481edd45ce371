"""The mask among the rows of a pass, which its layers share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.plugins.cascade_attention.arguments import OP, counters
from d2sd.plugins.dispatch import op

# Shape letters: B requests, T new rows.

#: Columns a word of a packed mask.
WORD = 32


@dataclass(frozen=True)
class AttnMask:
    """The mask of one pass, shared by its layers, which run in order: packed once, and only if a kernel runs."""

    allowed: Tensor  # [B, T, T] bool, row t may attend to row u. Every row, padding too, must attend to itself
    #: [B, T] int64, the first position of the context that each row sees; None: 0. At most the context's length plus
    #: the row's depth: of new rows `allowed` alone says which it sees.
    first: Tensor | None = None
    window: int | None = None  # most positions of the context that a row sees; None: all
    counters: Tensor | None = None  # `arrived` of a pool, which its passes share
    packed: Tensor | None = None  # `words`, where they are known: they may be broadcast over the requests

    @cached_property
    def words(self) -> Tensor:
        """[B, T, ceil(T/32)] int32."""
        return pack_mask_bits(self.allowed) if self.packed is None else self.packed.contiguous()

    @cached_property
    def order(self) -> Tensor:
        """[B, T, T + 2] int32 for the kernel of `exact`: the columns that each row sees, in their order, at T how many,
        and at T + 1 its leader: the last row that sees these first.

        In a tree the n-th of them is the key at position context_len + n. The other numbers are undefined.
        """
        from d2sd.plugins.cascade_attention.triton.exact import key_order

        return key_order(self.allowed)

    @cached_property
    def arrived(self) -> Tensor:
        """Zeroed split counters, shared by the layers of a pass."""
        return counters(self.allowed.device) if self.counters is None else self.counters


def allowed_of(attn_mask: Tensor | AttnMask) -> Tensor:
    """[B, T, T] bool of a mask, which is that, or has it."""
    return attn_mask if isinstance(attn_mask, Tensor) else attn_mask.allowed


@op(OP, loaded=True)
def pack_mask_bits(attn_mask: Tensor) -> Tensor:
    """[B, T, T] bool -> [B, T, ceil(T/32)] int32: attn_mask[b, t, u] is bit u % 32 of word [b, t, u // 32]; bits past T
    are 0.
    """
    padded = F.pad(attn_mask, (0, -attn_mask.shape[2] % WORD))
    bits = padded.view(*attn_mask.shape[:2], -1, WORD).int()
    shifts = torch.arange(WORD, device=attn_mask.device, dtype=torch.int32)
    # Bits are disjoint, so the sum is their union; the highest one is the sign.
    return (bits << shifts).sum(-1, dtype=torch.int32)
