"""The specification in plain PyTorch. It says what is computed, not in which order sums run."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, scales: tuple[Tensor, Tensor] | None, dtype: torch.dtype
) -> Tensor:
    """Sums in fp32, scaled, biased and rounded once; FP8 products are rounded before the bias, as `Fp8Linear` does."""
    wide = F.linear(x.float(), weight.float())
    if scales is not None:
        wide = (wide * (scales[0] * scales[1])).to(dtype).float()
    return (wide if bias is None else wide + bias.float()).to(dtype)


def key_order_reference(attn_mask: Tensor) -> Tensor:
    """`key_order` on any device; what is undefined is 0."""
    batch, rows, columns = attn_mask.shape
    rank = attn_mask.cumsum(-1) - 1
    order = torch.zeros(batch, rows, columns + 2, dtype=torch.int32, device=attn_mask.device)
    column = torch.arange(columns, dtype=torch.int32, device=attn_mask.device).expand_as(rank)
    order.scatter_(2, torch.where(attn_mask, rank, columns + 1), column)
    order[:, :, columns] = attn_mask.sum(-1)
    return order[:, :, : columns + 1].contiguous()
