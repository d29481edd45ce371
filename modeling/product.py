"""Linear layers of one input as one matrix product, for the fused layers of a model on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn

from d2sd.modeling.fp8 import Fp8Linear
from d2sd.modeling.product_forms import PLAIN, Form, Weights, bucket
from d2sd.modeling.quantized import ComputedLinear, joined
from d2sd.plugins.layer_ops import SPLIT_STEP, linear, quantize

Linear = nn.Linear | Fp8Linear | ComputedLinear


class Product(nn.Module):
    """Linear layers of one input as one product; holds no parameters, so it cannot be trained or saved.

    The op that reads a product of several FP8 layers adds `bias`. If their weights have different scales, the product
    is the bare sums in fp32, and that op applies `scales` too.
    """

    #: How so many rows are multiplied, by their bucket; others are by the plain form. Set before steps are captured.
    forms: Mapping[int, Form]
    _whole: Callable[[Tensor], Tensor] | None  # a product that quantizes its input itself

    def __init__(
        self, parts: Sequence[Linear], dtype: torch.dtype, *, exact: bool = False, has_room: bool = True
    ) -> None:
        """`has_room`: its input is made in `room`."""
        super().__init__()
        self._dtype, self._exact, self._has_room = dtype, exact, has_room
        self.forms = {}
        self._whole = None
        if isinstance(parts[0], ComputedLinear):
            whole = type(parts[0]).joined(parts)
            parts, self._whole = [whole], whole.exact if exact else whole.forward
        self.weight = joined([part.weight.detach() for part in parts])
        biases = [part.bias.detach() for part in parts if part.bias is not None]
        self.bias = self._added = torch.cat(biases) if biases else None
        tiles = -(-len(self.weight) // SPLIT_STEP)
        self._arrived = self.weight.new_zeros(tiles, dtype=torch.int32)
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
            if len(parts) > 1 and not _equal(self.weight_scales):
                self.scales = self.input_scale * self.weight_scales

    @classmethod
    def of(cls, weight: Tensor) -> Product:
        """The product of weights [out, in] alone, such as a head's."""
        layer = cast("Linear", SimpleNamespace(weight=weight, bias=None))
        return cls([layer], weight.dtype, has_room=False)

    @classmethod
    def joint(cls, parts: Sequence[nn.Module], dtype: torch.dtype, *, exact: bool) -> Product:
        """One product of linear layers, whose weights become views: held once, also by a model that keeps them."""
        layers = cast("Sequence[Linear]", parts)
        product = cls(layers, dtype, exact=exact)
        sizes = [layer.weight.shape[0] for layer in layers]
        for layer, weight in zip(layers, torch.split(product.weight, sizes), strict=True):
            layer.weight.data = weight
        return product

    @property
    def weights(self) -> Weights | None:
        """The weights for whose product a form can be chosen; None: it has its own."""
        if self._whole is not None or self._exact:
            return None
        if self.input_scale is None:
            return Weights(self.weight, self._dtype, self.bias, room=self._has_room, arrived=self._arrived)
        if self.scales is not None:
            dtype, scales = torch.float32, (self._one, self._one)
        else:
            dtype, scales = self._dtype, (self.input_scale, self._weight_scale)
        scaled = self.scales is None
        return Weights(self.weight, dtype, scales=scales, scaled=scaled, room=self._has_room, arrived=self._arrived)

    def room(self, rows: int) -> Tensor | None:
        """Memory for an input [rows, in] behind which the chosen form may read more rows; None: any will do."""
        if self._whole is not None or self._exact:
            return None
        dtype = self._dtype if self.input_scale is None else torch.float8_e4m3fn
        reads = self._form(rows).reads(rows, dtype)
        return self.weight.new_empty(reads, self.weight.shape[1], dtype=dtype)[:rows]

    def _form(self, rows: int) -> Form:
        return self.forms.get(bucket(rows), PLAIN) if self.forms else PLAIN

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] in the model's type, or in FP8 by `input_scale` -> [..., out]."""
        if self._whole is not None:
            out: Tensor = self._whole(x)
            return out
        rows = x.flatten(0, -2)
        if self.input_scale is not None and rows.dtype != torch.float8_e4m3fn:
            rows = quantize(rows.contiguous(), self.input_scale, out=self.room(len(rows)))
        out = self._exact_product(rows) if self._exact else self._product(rows)
        return out.view(*x.shape[:-1], -1)

    def _product(self, rows: Tensor) -> Tensor:
        weights = self.weights
        assert weights is not None
        out = self._form(len(rows)).call(rows, weights)
        return out if self._added is None or self.input_scale is None else out + self._added

    def _exact_product(self, rows: Tensor) -> Tensor:
        if self.input_scale is None:
            return linear(rows, self.weight, self.bias)
        if self.scales is not None:
            return linear(rows, self.weight, dtype=torch.float32)
        scales = self.input_scale, self._weight_scale
        return linear(rows, self.weight, self._added, scales=scales, dtype=self._dtype)


def unjoinable(group: Sequence[nn.Module], *, exact: bool, context: bool = False) -> str | None:
    """Reason that layers of one input are not one product. `context`: it is to make that of a drafter's context too."""
    kinds = {type(part) for part in group}
    (kind,) = kinds if len(kinds) == 1 else (None,)
    if kind in (nn.Linear, Fp8Linear):
        return None
    if kind is None or not issubclass(kind, ComputedLinear):
        return f"layers of {', '.join(sorted(kind.__name__ for kind in kinds))} side by side"
    reason = kind.unjoinable(group, exact=exact)
    return reason or (f"{kind.__name__} has no product for a drafter's context" if context else None)


def _equal(scales: Tensor) -> bool:
    """Whether all numbers are the same; read once, when a model is loaded."""
    return bool((scales == scales[0]).all())


def sums(x: Tensor, weight: Tensor, one: Tensor, out: Tensor | None = None) -> Tensor:
    """FP8 x [R, in] and weight [out, in] -> x Wᵀ [R, out] in fp32, unscaled. `one` is 1."""
    product: Tensor = torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, out=out)
    return product
