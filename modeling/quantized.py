"""Linear layers with the tensors of a published quantization scheme: what they dequantize to, and their products.

    y = Σ_g (r(x)_g · W_gᵀ) · s_x[g] · s_w[g] + b        g: inputs that share a scale; all of them in most schemes

r(x) are rounded inputs and W stored values; a wider type represents both exactly. A device that has a product of the
scheme's narrow types computes with those. Others carry the same values in the wider type: only the order of the sum and
the rounding of the result differ. No scale is of more than one row, so a row does not depend on the others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Shape letters: R rows, G groups of inputs that share a scale.

#: x [..., in] -> rounded values [..., in] in a narrow type, and their scales [..., G] fp32.
Rounding = Callable[[Tensor], tuple[Tensor, Tensor]]
#: Inputs of a group [..., n] -> sums [..., out].
GroupProduct = Callable[[Tensor], Tensor]
#: Inputs, outputs and whether there is a bias -> a layer without values.
Empty = Callable[[int, int, bool], "QuantizedLinear"]


def carrier(dtype: torch.dtype) -> torch.dtype:
    """The type in which a model of `dtype` multiplies narrow values without products of their own.

    Unscaled sums overflow FP16.
    """
    return torch.float32 if dtype == torch.float16 else dtype


class QuantizedLinear(nn.Module):
    """W [out, in] in the tensors of a scheme, which have the names of its checkpoints. Inference only: no gradient."""

    #: Name of the plain tensor below the layer's; "": the layer's own.
    weight_name = "weight"

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    #: Outputs and inputs that share a scale or a byte: tensor parallelism does not divide them.
    steps: tuple[int, int] = (1, 1)

    @abstractmethod
    def dequantized(self) -> Tensor:
        """W [out, in] in fp32."""

    def fault(self) -> tuple[str, object, object] | None:
        """A tensor whose values are not of this layer: its name, what it says, and what it must say."""
        return None

    def store(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Make an empty tensor of the checkpoint."""
        self.register_buffer(name, torch.empty(tuple(shape), dtype=dtype))


@dataclass(frozen=True, slots=True)
class Carried:
    """A layer's product in a wider type."""

    products: Sequence[GroupProduct]  # one a group of inputs
    group: int  # inputs of a group; of the last, at most
    rounding: Rounding
    scales: Tensor  # [G, out] or [1, 1] fp32, of the weights
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] in the model's type -> y [..., out]."""
        values, scales = self.rounding(x)
        total: Tensor | None = None
        for index, part in enumerate(torch.split(values.to(carrier(x.dtype)), self.group, -1)):
            sums = self.products[index](part)
            wide = sums.to(torch.promote_types(sums.dtype, torch.float32))
            scaled = wide * scales[..., index, None] * self.scales[index]
            total = scaled if total is None else total + scaled
        assert total is not None
        out = total.to(x.dtype)
        return out if self.bias is None else out + self.bias


class ComputedLinear(QuantizedLinear):
    """A layer with a product: x [..., in] and y [..., out] in the model's type."""

    weight: Tensor  # as stored, [out, ...], where layers can be joined
    #: Inputs that share a scale; None: all.
    group: int | None = None

    @abstractmethod
    def rounding(self) -> Rounding:
        """How inputs are rounded; holds no weights."""

    @abstractmethod
    def values(self, dtype: torch.dtype) -> Tensor:
        """The stored values [out, in] in `dtype`, which represents them exactly."""

    @abstractmethod
    def scales(self) -> Tensor:
        """[G, out] or [1, 1], fp32."""

    @abstractmethod
    def gemm(self, x: Tensor) -> Tensor | None:
        """x [R, in] on CUDA -> x Wᵀ [R, out] in narrow types; None where this device has no such product."""

    def dequantized(self) -> Tensor:
        of_inputs = self.scales().repeat_interleave(self.group or self.in_features, 0)[: self.in_features]
        return self.values(torch.float32) * of_inputs.t()

    def carried(self, dtype: torch.dtype, product: Callable[[Tensor], GroupProduct]) -> Carried:
        """The product of a model of `dtype` in a wider type; `product` makes that of a group's weights [out, n]."""
        size = self.group or self.in_features
        parts = torch.split(self.values(carrier(dtype)), size, 1)
        bias = None if self.bias is None else self.bias.detach()
        return Carried([product(part) for part in parts], size, self.rounding(), self.scales(), bias)

    def prepare(self) -> None:
        """Make a filled layer ready to serve on its device; raises `D2SDError` for one that does not serve it."""

    @classmethod
    def unjoinable(cls, parts: Sequence[Any], *, exact: bool) -> str | None:
        """Why `parts`, layers of this class with one input, are not one product; None where `joined` makes it.

        `exact`: it has to be batch-invariant.
        """
        return f"{cls.__name__} has no joint product{' that is batch-invariant' * exact}"

    @classmethod
    def joined(cls, parts: Sequence[Any]) -> Any:
        """One layer of the outputs of `parts`; the largest of their calibrated scales rounds its inputs."""
        raise NotImplementedError

    def exact(self, x: Tensor) -> Tensor:
        """`forward` on CUDA by a batch-invariant product."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        out = self.gemm(x.flatten(0, -2)) if x.device.type == "cuda" else None
        if out is None:
            return self.carried(x.dtype, _plain_product)(x)
        out = out.view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def _plain_product(weight: Tensor) -> GroupProduct:
    return lambda x: F.linear(x, weight)


def joined(weights: Sequence[Tensor]) -> Tensor:
    """[out, in] each, one below the other."""
    if len(weights) == 1:
        return weights[0]
    stored = [weight.view(torch.uint8) if weight.dtype == torch.float8_e4m3fn else weight for weight in weights]
    return torch.cat(stored).view(weights[0].dtype)  # PyTorch does not join FP8 tensors on every device


def make_quantized(model: nn.Module, layers: Mapping[str, Empty]) -> None:
    """Replace linear layers of a model on the meta device by empty ones."""
    for name, empty in layers.items():
        parent, _, last = name.rpartition(".")
        old = model.get_submodule(name)
        assert isinstance(old, nn.Linear)
        layer = empty(old.in_features, old.out_features, old.bias is not None)
        setattr(model.get_submodule(parent), last, layer)
