"""The target over a text that is given: every next-token distribution in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.rows import KVPool, Rows


@torch.inference_mode()
def teacher_forced_logits(target: Decoder, tokens: Sequence[int], start: int = 0) -> Tensor:
    """Logits [T - start, V] in fp32 behind each of `tokens` [T] from place `start` on."""
    body, weight = target.config.body, target.embed_tokens.weight
    no_pages = KVPool(body.num_layers, 1, 1, body.num_kv_heads, body.head_dim, weight.dtype, str(weight.device))
    nothing = torch.zeros(1, dtype=torch.long, device=weight.device)
    rows = Rows.chain(len(tokens), nothing.view(1, 1)[:, :0], nothing)
    hidden = target(torch.tensor([list(tokens)], device=weight.device), rows, no_pages).hidden
    return target.logits(hidden[0, start:])
