"""Launches the kernels of a call: those of `exact`, or the fused one."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from torch import Tensor

from d2sd.plugins.cascade_attention.arguments import AttnMask, ChunkMask
from d2sd.plugins.cascade_attention.triton.exact import exact_attention
from d2sd.plugins.cascade_attention.triton.launch import launch


def cascade_attention(q, k, v, context, attn_mask, *, sinks=None, scale=None, exact=False, out=None):
    mask = AttnMask(attn_mask) if isinstance(attn_mask, Tensor) else attn_mask
    if exact:
        return exact_attention(q, k, v, context, mask, sinks, scale)
    words = mask if isinstance(mask, ChunkMask) else mask.words
    more = {"sinks": sinks, "scale": scale, "out": out, "arrived": lambda: mask.arrived}
    return launch(q, k, v, context, words, first=mask.first, window=mask.window, **more)
