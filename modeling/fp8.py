"""FP8 (E4M3) linear layers and K/V with one scale a tensor, as ModelOpt calibrates them and TensorRT computes them.

    y = fp8(x / s_x) · fp8(W / s_w)ᵀ · s_x s_w + b        |fp8(·)| ≤ 448, rounded to nearest even, saturating

A CUDA device with FP8 tensor cores multiplies FP8 by FP8 and accumulates in fp32. Other devices multiply the same
values in a wider type that represents them exactly: only the order of the sum and the rounding of the result differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.quantized import QuantizedLinear, carrier, make_quantized
from d2sd.plugins.dispatch import use_fp8_gemm
from d2sd.plugins.shared.fp8 import LARGEST, from_pages, to_pages

if TYPE_CHECKING:
    from d2sd.modeling.inference import ServedModel

#: Ends of the names of layers that are computed as one product, and so have one scale of weights each.
_JOINED = re.compile(r"\.([qkv]|gate|up)_proj$")

#: Attribute of models whose linear layers are FP8, `DraftModel.in_fp8`.
IN_FP8 = "in_fp8"


def carried_product(
    x: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """`Fp8Linear` without FP8 GEMMs; `weight` holds the FP8 values in the type that `carrier` gives."""
    product = F.linear(to_pages(x, input_scale).to(weight.dtype), weight)
    wide = product.to(torch.promote_types(product.dtype, torch.float32))
    out = (wide * (input_scale * weight_scale)).to(x.dtype)
    return out if bias is None else out + bias


class Fp8Linear(QuantizedLinear):
    """W [out, in] in FP8; x [..., in] and y [..., out] in the model's type. Inference only: no gradient."""

    weight_scale: Tensor  # 0-dim fp32
    input_scale: Tensor  # 0-dim fp32

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__(in_features, out_features, bias)
        empty = torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.store("weight_scale", (), torch.float32)
        self.store("input_scale", (), torch.float32)

    @classmethod
    def of(cls, layer: nn.Linear, input_scale: float | Tensor, weight_scale: Tensor) -> Fp8Linear:
        """`layer` with its weights rounded."""
        fp8_layer = cls(layer.in_features, layer.out_features, layer.bias is not None)
        weight = layer.weight.detach()
        fp8_layer.weight_scale = weight_scale.clone()
        fp8_layer.input_scale = torch.as_tensor(input_scale, device=weight.device)
        fp8_layer.weight = nn.Parameter(to_pages(weight, fp8_layer.weight_scale), requires_grad=False)
        fp8_layer.bias = layer.bias
        return fp8_layer

    def dequantized(self) -> Tensor:
        return from_pages(self.weight, self.weight_scale, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        if not use_fp8_gemm(x):
            weight = self.weight.to(carrier(x.dtype))
            return carried_product(x, weight, self.input_scale, self.weight_scale, self.bias)
        out: Tensor = torch._scaled_mm(
            to_pages(x.flatten(0, -2), self.input_scale),
            self.weight.t(),
            scale_a=self.input_scale,
            scale_b=self.weight_scale,
            out_dtype=x.dtype,
        )
        out = out.view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


class Fp8Cache(nn.Module):
    """Rounds K or V to what FP8 pages hold: a row's K/V are the same before and after it is committed."""

    scale: Tensor  # 0-dim fp32

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.empty((), dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return from_pages(to_pages(x, self.scale), self.scale, x.dtype)


def linear_names(model: nn.Module) -> list[str]:
    """Names of the layers that can be quantized: all linear layers except the language-model head."""
    kinds = (nn.Linear, QuantizedLinear)
    return [name for name, layer in model.named_modules() if isinstance(layer, kinds) and name != "lm_head"]


def make_fp8(model: nn.Module, linears: Collection[str], *, cache: bool = False) -> None:
    """Replace `linears` of a model on the meta device by empty FP8 layers; with `cache`, make its K/V FP8 too."""
    make_quantized(model, dict.fromkeys(linears, Fp8Linear))
    setattr(model, IN_FP8, bool(linears))
    if cache:
        make_fp8_cache(model)


def make_fp8_cache(model: nn.Module) -> None:
    """Make the K/V of a model on the meta device FP8."""
    for attention in _attentions(cast("ServedModel", model)):
        attention.k_cache, attention.v_cache = Fp8Cache(), Fp8Cache()


def _attentions(model: ServedModel) -> list[Any]:
    """Attentions of the layers that attend."""
    return [layer.mixer for layer in model.own_layers if not layer.mixer.recurrent]


def round_to_fp8(model: nn.Module, input_scales: Mapping[str, float]) -> None:
    """Replace these linear layers of a loaded model by FP8 layers, rounded as ModelOpt rounds them: the largest weight
    of layers that are one product becomes the largest E4M3 number.
    """
    layers = {name: cast("nn.Linear", model.get_submodule(name)) for name in input_scales}
    largest: dict[str, Tensor] = {}
    for name, layer in layers.items():
        product, maximum = _JOINED.sub("", name), layer.weight.detach().abs().max()
        largest[product] = torch.maximum(largest.get(product, maximum), maximum)
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        scale = largest[_JOINED.sub("", name)].float() / LARGEST
        setattr(model.get_submodule(parent), last, Fp8Linear.of(layer, input_scales[name], scale))
    if layers:
        setattr(model, IN_FP8, True)


def kv_scales(model: ServedModel) -> tuple[Tensor, Tensor] | None:
    """Scales of the FP8 pages of a model's K/V, (k, v), [L] fp32 each, of the layers that attend; None where its K/V
    are not FP8.

    An exported graph has no layers, so its pages have the type of the graph's inputs.
    """
    if model.compiled is not None:
        return model.compiled.kv_scales
    attentions = _attentions(model)
    if not attentions or not isinstance(attentions[0].k_cache, Fp8Cache):
        return None
    k, v = (torch.stack([getattr(a, kind).scale.float() for a in attentions]) for kind in ("k_cache", "v_cache"))
    return k, v
