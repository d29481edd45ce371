"""Launches the kernels of a call: those of `exact`, or the fused one."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention.arguments import ChunkMask
from d2sd.plugins.cascade_attention.mask import AttnMask
from d2sd.plugins.cascade_attention.triton.exact import attend
from d2sd.plugins.cascade_attention.triton.launch import launch
from d2sd.plugins.layer_ops import quantize


def cascade_attention(q, k, v, context, attn_mask, *, sinks=None, scale=None, exact=False, out=None):
    """Chunks of prompts run one after the other with `exact`."""
    mask: AttnMask | ChunkMask = AttnMask(attn_mask) if isinstance(attn_mask, Tensor) else attn_mask
    if not exact:
        words = mask if isinstance(mask, ChunkMask) else mask.words
        more = {"sinks": sinks, "scale": scale, "out": out, "arrived": lambda: mask.arrived}
        return launch(q, k, v, context, words, first=mask.first, window=mask.window, **more)
    if isinstance(mask, AttnMask):
        heads = attend(q, k, v, context, mask.order, mask.first, sinks)
    else:
        parts = []
        for span, prompt in zip(mask.spans(), mask.alone(q, k, v, context), strict=True):
            parts.append(attend(*prompt, None, None if mask.first is None else mask.first[None, span], sinks))
        heads = torch.cat(parts, 1)
    return heads if scale is None else quantize(heads, scale)
