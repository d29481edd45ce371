"""Layers packed for inference on a CPU.

Where there is a C compiler the layers of a model run as compiled kernels (`d2sd.plugins.cpu`), otherwise as PyTorch
operators. FP8 weights are converted once to the type in which they are multiplied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.decoder import Decoder, TargetModel
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.fp8 import Fp8Linear, carried_product, carrier
from d2sd.modeling.inference import plain, replace_layers
from d2sd.modeling.layers import Layer
from d2sd.modeling.native import NativeLayers, supported
from d2sd.plugins.cpu import library


def packed_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x [..., in] -> x Wᵀ + b by the compiled kernels, which return fp32, or where they are missing by PyTorch."""
    if weight.dtype in library.TYPES and library.available():
        return library.PackedLinear.of(weight, bias)
    return partial(F.linear, weight=weight, bias=bias)


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with packed W; holds no parameters, so it cannot be trained or saved."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self._product = packed_product(weight.detach(), None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x).to(x.dtype)


class PackedFp8Linear(nn.Module):
    """An FP8 layer whose weight is converted once, for a model of `dtype`."""

    def __init__(self, layer: Fp8Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._weight = layer.weight.to(carrier(dtype))
        self._scales = layer.input_scale, layer.weight_scale
        self._bias = None if layer.bias is None else layer.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return carried_product(x, self._weight, *self._scales, self._bias)


def pack(model: TargetModel | DraftModel, target: TargetModel | None = None) -> None:
    """Replace the layers of a CPU model in place, and give a target's head a packed copy.

    `target` lends its MLPs to a drafter that borrows them, and is packed before.

    Packing twice is fine. Afterwards `state_dict` lacks the replaced weights: a packed model can only serve.
    """
    weight = next((one for one in model.parameters() if one.dtype != torch.float8_e4m3fn), None)
    if weight is None:
        return
    own = plain(model)
    if own is not None and supported(own.config.body, own.layers, weight.dtype):
        shared = target.compiled if isinstance(target, Decoder) else None
        assert shared is None or isinstance(shared, NativeLayers)
        layers, context = cast("Sequence[Layer]", own.layers), isinstance(model, Drafter)
        replace_layers(own, NativeLayers(own.config.body, layers, own.norm, context=context, target=shared))
    elif not library.available():
        _say_why(str(library.load()))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Fp8Linear):
                setattr(parent, name, PackedFp8Linear(child, weight.dtype))
            elif type(child) is nn.Linear and name != "lm_head":
                setattr(parent, name, PackedLinear(child.weight, child.bias))
    if isinstance(model, TargetModel) and model.packed_head is None:
        model.packed_head = packed_product(model.head.detach(), None)


@cache
def _say_why(reason: str) -> None:
    print(f"d2sd: layers run as PyTorch operators, several times slower: {reason}", file=sys.stderr, flush=True)


def reduced_head(target: TargetModel, ids: Tensor) -> Callable[[Tensor], Tensor]:
    """The target's head over `ids [Vd]`: [..., E] -> [..., Vd]. A copy of its rows, packed where the head is."""
    weight = target.head.detach()[ids]
    plain = target.packed_head is None or weight.device.type != "cpu"  # drafts need not be batch-invariant
    return partial(F.linear, weight=weight) if plain else packed_product(weight, None)
