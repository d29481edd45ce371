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
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

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
    body = drafter.config.body
    masks = {view: packed_mask(positions, length, *view) for view in set(body.views)}
    run = _compiled() if features.is_cuda else _plain

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        # cast to one dtype: under autocast norms and products return different ones
        all_k, all_v = (
            torch.cat([context[index].to(v.dtype), rows.to(v.dtype)], dim=1).transpose(1, 2)  # [B, Hkv, S + T, D]
            for context, rows in ((keys, k), (values, v))
        )
        mask = masks[body.views[index]]
        out: Tensor = run(
            q.to(v.dtype).transpose(1, 2),
            all_k,
            all_v,
            block_mask=mask,
            enable_gqa=True,
            return_aux=None if sinks is None else AuxRequest(lse=True),
        )
        if sinks is not None:
            out, aux = out
            share = (aux.lse - sinks.float()[:, None]).sigmoid()  # of each softmax, what the sink leaves [B, Hq, T]
            out = out * share[..., None].to(out.dtype)
        return out.transpose(1, 2)

    return attend


def packed_mask(positions: Tensor, length: int, window: int | None = None, causal: bool = False) -> BlockMask:
    """The mask drawn above, for positions [B, A, G] in sequences of `length` tokens, in a layer of this view.

    A padding block has position 0: it has no context, but attends to itself, so no row is fully masked.
    """
    batch, blocks, slots = positions.shape
    anchors = positions[:, :, 0].contiguous()

    def visible(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        block, slot = row // slots, row % slots
        place, own = anchors[b, block] + slot, (key - length) % slots
        context, inner = key < anchors[b, block], (key - length) // slots == block
        if causal:
            inner = inner & (own <= slot)
        if window is not None:
            context, inner = context & (place - key < window), inner & (slot - own < window)
        return torch.where(key < length, context, inner)

    rows = blocks * slots
    return create_block_mask(visible, batch, None, rows, length + rows, device=positions.device)


#: Typed loosely, since `flex_attention` is overloaded.
_plain: Callable[..., Any] = flex_attention


@cache
def _compiled() -> Callable[..., Any]:
    """Compiled with dynamic shapes, since sequence lengths differ from step to step."""
    return torch.compile(_plain, dynamic=True)
