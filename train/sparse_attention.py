"""`packing.attend_packed` with FlexAttention, for CUDA: stores no scores and skips fully masked blocks.

    keys      context of the sequence 0 .. S-1      slots of block 0 | block 1 | … | block A-1
    queries   ┌───────────────────────────────────┬───────────────────────────────────────────┐
    block a,  │ 1 … 1 (before anchor a)  0 … 0    │    0     |    0    | … 1 (block a) … |  0   │
    γ slots   └───────────────────────────────────┴───────────────────────────────────────────┘

Verified on a CPU, where flex_attention has no backward pass: its values against `attend_packed`. Neither the compiled
kernel nor its gradients have been run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.layers import Attend

# Shape letters: B sequences, A blocks of each, G block size γ, S tokens, T = A·G rows, Hq/Hkv heads, D head size.


def attend_sparse(drafter: Drafter, features: Tensor, positions: Tensor) -> Attend:
    """Same arguments and results as `attend_packed`: features [B, S, n·E], positions [B, A, G].

    Context and rows are concatenated in each layer, since FlexAttention reads one key tensor; the mask is built once.
    """
    batch, length = features.shape[:2]
    tokens = torch.arange(length, device=features.device)
    keys, values = drafter.context_keys_values(features, tokens.expand(batch, -1))  # [L, B, S, Hkv, D]
    mask = packed_mask(positions, length)
    run = _compiled() if features.is_cuda else _plain

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        # cast to one dtype: under autocast norms and products return different ones
        all_k, all_v = (
            torch.cat([context[index].to(v.dtype), rows.to(v.dtype)], dim=1).transpose(1, 2)  # [B, Hkv, S + T, D]
            for context, rows in ((keys, k), (values, v))
        )
        out = run(q.to(v.dtype).transpose(1, 2), all_k, all_v, block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    return attend


def packed_mask(positions: Tensor, length: int) -> BlockMask:
    """The mask drawn above, for positions [B, A, G] in sequences of `length` tokens.

    A padding block has position 0: it has no context, but attends to itself, so no row is fully masked.
    """
    batch, blocks, slots = positions.shape
    anchors = positions[:, :, 0].contiguous()

    def visible(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        block = row // slots
        return torch.where(key < length, key < anchors[b, block], (key - length) // slots == block)

    rows = blocks * slots
    return create_block_mask(visible, batch, None, rows, length + rows, device=positions.device)


#: Typed loosely, since `flex_attention` is overloaded.
_plain: Callable[..., Tensor] = flex_attention


@cache
def _compiled() -> Callable[..., Tensor]:
    """Compiled with dynamic shapes, since sequence lengths differ from step to step."""
    return torch.compile(_plain, dynamic=True)
