"""The greedy choice as a call of the compiled library: tensors on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins.cpu.library import address, functions
from d2sd.token_codes import NOT_FINITE


def best_token_cpu(logits: Tensor) -> Tensor:
    """`best_token` of fp32."""
    chosen = argmax(logits)
    return chosen.where(logits.gather(-1, chosen[..., None])[..., 0].isfinite(), NOT_FINITE)


def argmax(logits: Tensor) -> Tensor:
    """logits [..., V] fp32 -> [...]: the first of the largest; NaN counts as the largest."""
    rows = logits.contiguous()
    out = torch.empty(logits.shape[:-1], dtype=torch.long)
    functions().d2sd_argmax(address(rows), out.numel(), logits.shape[-1], address(out))
    return out
