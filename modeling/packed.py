"""Linear layers in oneDNN's blocked layout, for inference on a CPU.

PyTorch multiplies fp32 with MKL and plain weights. For the few rows of a decode step oneDNN with weights packed once is
two to three times faster (36 rows on one core of an AMD EPYC with AVX-512: 119 against 41 GFLOP/s). The operators are
those torch.compile uses. Half precision is not packed: PyTorch uses oneDNN for it already, where the processor can.
FP8 weights are converted once to the type in which they are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.decoder import TargetModel
from d2sd.modeling.drafter import DraftModel
from d2sd.modeling.fp8 import Fp8Linear, carried_product, carrier


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with W [out, in] packed; holds no parameters, so it cannot be trained or saved."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


class PackedFp8Linear(nn.Module):
    """An FP8 layer whose weight is converted once, for a model of `dtype`."""

    def __init__(self, layer: Fp8Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._weight = layer.weight.to(carrier(dtype))
        self._scales = layer.input_scale, layer.weight_scale
        self._bias = None if layer.bias is None else layer.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return carried_product(x, self._weight, *self._scales, self._bias)


def pack(model: TargetModel | DraftModel) -> None:
    """Replace every linear layer of a CPU model in place, and give a target's head a packed copy.

    Packing twice is fine. Afterwards `state_dict` lacks the replaced weights: a packed model can only serve.
    """
    weight = next(model.parameters(), None)
    if weight is None:
        return
    blocked = weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Fp8Linear):
                setattr(parent, name, PackedFp8Linear(child, weight.dtype))
            elif isinstance(child, nn.Linear) and name != "lm_head" and blocked:
                setattr(parent, name, PackedLinear(child.weight, child.bias))
    if blocked and isinstance(model, TargetModel) and model.packed_head is None:
        model.packed_head = PackedLinear(model.head)


def reduced_head(target: TargetModel, ids: Tensor) -> Callable[[Tensor], Tensor]:
    """The target's head over `ids [Vd]`: [..., E] -> [..., Vd]. A copy of its rows, packed where the head is."""
    weight = target.head.detach()[ids]
    return partial(F.linear, weight=weight) if target.packed_head is None else PackedLinear(weight)
