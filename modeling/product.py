"""Linear layers of one input as one matrix product, for the fused layers of a model on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.fp8 import Fp8Linear
from d2sd.modeling.quantized import ComputedLinear, joined
from d2sd.plugins.layer_ops import linear, quantize

Linear = nn.Linear | Fp8Linear | ComputedLinear


class Product(nn.Module):
    """Linear layers of one input as one product; holds no parameters, so it cannot be trained or saved.

    The op that reads a product of several FP8 layers adds `bias`. If their weights have different scales, the product
    is the bare sums in fp32, and that op applies `scales` too.
    """

    _whole: Callable[[Tensor], Tensor] | None  # a product that quantizes its input itself

    def __init__(self, parts: Sequence[Linear], dtype: torch.dtype, *, exact: bool = False) -> None:
        super().__init__()
        self._dtype, self._exact = dtype, exact
        self._whole = None
        if isinstance(parts[0], ComputedLinear):
            whole = type(parts[0]).joined(parts)
            parts, self._whole = [whole], whole.exact if exact else whole.forward
        self.weight = joined([part.weight.detach() for part in parts])
        biases = [part.bias.detach() for part in parts if part.bias is not None]
        self.bias = self._added = torch.cat(biases) if biases else None
        self.input_scale: Tensor | None = None  # of what the op before quantizes
        self.weight_scales: Tensor | None = None  # [parts] fp32, and their products with `input_scale`, if they differ
        self.scales: Tensor | None = None
        if isinstance(parts[0], Fp8Linear):
            quantized = cast("Sequence[Fp8Linear]", parts)
            self.input_scale = torch.stack([part.input_scale for part in quantized]).max()
            self._weight_scale = quantized[0].weight_scale
            self._one = torch.ones_like(self._weight_scale)
            self.weight_scales = torch.stack([part.weight_scale for part in quantized])
            if len(parts) > 1:
                self._added = None
            if not _equal(self.weight_scales):
                self.scales = self.input_scale * self.weight_scales

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] in the model's type, or in FP8 by `input_scale` -> [..., out]."""
        if self._whole is not None:
            out: Tensor = self._whole(x)
            return out
        if self.input_scale is None:
            product = linear if self._exact else F.linear
            return product(x, self.weight, self.bias)
        rows = x.flatten(0, -2)
        if rows.dtype != torch.float8_e4m3fn:
            rows = quantize(rows.contiguous(), self.input_scale)
        if self._exact:
            if self.scales is not None:
                return linear(rows, self.weight, dtype=torch.float32)
            scales = self.input_scale, self._weight_scale
            output = linear(rows, self.weight, self._added, scales=scales, dtype=self._dtype)
            return output.view(*x.shape[:-1], -1)
        if self.scales is not None:
            return sums(rows, self.weight, self._one)
        out = torch._scaled_mm(
            rows, self.weight.t(), scale_a=self.input_scale, scale_b=self._weight_scale, out_dtype=self._dtype
        )
        out = out.view(*x.shape[:-1], -1)
        return out if self._added is None else out + self._added


def _equal(scales: Tensor) -> bool:
    """Whether all numbers are the same; read once, when a model is loaded."""
    return bool((scales == scales[0]).all())


def sums(x: Tensor, weight: Tensor, one: Tensor, out: Tensor | None = None) -> Tensor:
    """FP8 x [R, in] and weight [out, in] -> x Wᵀ [R, out] in fp32, unscaled. `one` is 1."""
    product: Tensor = torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, out=out)
    return product
