"""The target's head over a draft vocabulary: a copy of its rows, in FP8 for drafters whose layers are FP8."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from d2sd.modeling.decoder import TargetModel
from d2sd.modeling.drafters.interface import DraftModel, Tables
from d2sd.modeling.feed_forward import soft_cap
from d2sd.modeling.fp8 import Fp8Linear
from d2sd.modeling.layers import RMSNorm
from d2sd.modeling.native import PackedLinear, packed_product
from d2sd.modeling.product import Product
from d2sd.plugins.shared.fp8 import LARGEST

#: Outputs and inputs of an FP8 product are multiples of this in PyTorch on CUDA.
FP8_STEP = 16
Role = TypeVar("Role")
Head = Callable[[Tensor], Tensor]


def draft_tables(target: TargetModel, drafters: Mapping[Role, DraftModel]) -> dict[Role, Tables]:
    """Embedding and head of each drafter; those with the same draft vocabulary and type share a head."""
    heads: dict[object, Head] = {}

    def head(drafter: DraftModel) -> Head:
        if drafter.draft_ids is None or drafter.autoregressive:  # which has a head of its own
            return target.raw_logits
        sharing = [d for d in drafters.values() if _key(d) == _key(drafter)]
        if _key(drafter) not in heads:
            largest = torch.stack([*map(largest_hidden, sharing)]).max() if drafter.in_fp8 else None
            heads[_key(drafter)] = _capped(reduced_head(target, drafter.draft_ids, largest), target.config.logit_cap)
        return heads[_key(drafter)]

    return {role: Tables(target.embed_tokens, head(drafter)) for role, drafter in drafters.items()}


def _capped(head: Head, cap: float | None) -> Head:
    """The head with the target's soft cap, which bounds how sure a draft is."""
    return head if cap is None else lambda hidden: soft_cap(head(hidden), cap)


def _key(drafter: DraftModel) -> object:
    return drafter.config.draft_vocabulary, drafter.in_fp8


def largest_hidden(drafter: DraftModel) -> Tensor:
    """Bound of the magnitude of a drafter's hidden states, which its last norm gives; 0-dim fp32.

    E numbers whose mean square is 1 are at most √E each. FP8 is a floating-point type: scaled by this bound nothing
    saturates, and typical numbers, 1/√E of it, keep all bits of their significand (E4M3 has 2¹⁵ from its least normal
    number to its largest).
    """
    norm: Any = drafter.norm
    assert isinstance(norm, RMSNorm)
    return norm.scale.detach().float().abs().max() * math.sqrt(norm.weight.numel())


def reduced_head(target: TargetModel, ids: Tensor, largest: Tensor | None = None) -> Head:
    """The target's head over `ids [Vd]`: [..., E] -> [..., Vd]. A copy of its rows, packed where the head is.

    In FP8 if `largest` bounds its inputs, and PyTorch has such a product: a draft's logits decide what is proposed,
    never what is accepted.
    """
    weight = target.head_rows(ids)
    on_cpu = target.packed_head is not None and weight.device.type == "cpu"  # drafts need not be batch-invariant
    uneven = weight.device.type != "cpu" and any(size % FP8_STEP for size in weight.shape)
    if largest is None or uneven:
        return packed_product(weight, None) if on_cpu else Product.of(weight)
    whole = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    whole.weight = nn.Parameter(weight, requires_grad=False)
    scale = weight.detach().abs().max().float() / LARGEST
    layer = Fp8Linear.of(whole, largest / LARGEST, scale)
    if weight.device.type == "cpu":
        return PackedLinear.of(layer, weight.dtype) if on_cpu else layer
    return Product([layer], weight.dtype)
