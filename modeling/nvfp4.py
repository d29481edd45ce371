"""NVFP4 layers: E2M1 numbers, two a byte, with an E4M3 scale for every 16 inputs and one fp32 scale in all.

    W = e2m1 · scale of the group · scale of the tensor          inputs likewise, their groups' scales made as they come

The first of two numbers is in the low four bits: sign, two bits of exponent, one of fraction. ModelOpt writes
`weight`, and scales that are multiplied; compressed-tensors `weight_packed`, and global scales that are divided by.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from d2sd.modeling.quantized import ComputedLinear, QuantizedLinear, Rounding
from d2sd.modeling.scheme import NVFP4_GROUP as GROUP
from d2sd.plugins.dispatch import require_fp4_gemm
from d2sd.plugins.shared.fp8 import LARGEST

# Shape letters: R rows, G groups of inputs that share a scale.

#: E2M1 by its code without the sign.
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_RECIPE = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
_SWIZZLE = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]


def unpacked(packed: Tensor) -> Tensor:
    """Bytes [..., n/2] -> E2M1 numbers [..., n] fp32."""
    numbers = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)], device=packed.device)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return numbers[codes.int()]


def codes_of(x: Tensor) -> Tensor:
    """The nearest E2M1 code of each number, of two the even one; what exceeds all is the largest. [...] uint8."""
    code, size = 8 * torch.signbit(x).to(torch.uint8), x.abs()
    for number, (low, high) in enumerate(pairwise(NUMBERS)):  # no table: a CUDA graph cannot capture its copy
        half = (low + high) / 2
        code += size > half if number % 2 == 0 else size >= half
    return code


def by_group(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., in] and its tensor's scale -> E2M1 codes [..., in] uint8, and E4M3 scales of groups [..., in/16]."""
    groups = x.float().reshape(*x.shape[:-1], -1, GROUP)
    of_group = (groups.abs().amax(-1) / (NUMBERS[-1] * scale)).clamp(max=LARGEST).to(torch.float8_e4m3fn)
    wide = of_group.float() * scale
    codes = codes_of(groups / wide.masked_fill(wide == 0, math.inf)[..., None])  # a scale of zero: a group of zeros
    return codes.flatten(-2), of_group


def _carried(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded inputs as numbers times the scales of their groups, exact in 16 bits, and `scale` [..., 1]."""
    codes, of_group = by_group(x, scale)
    values = unpacked(codes[..., ::2] | codes[..., 1::2] << 4) * of_group.float().repeat_interleave(GROUP, -1)
    return values, scale.expand(*x.shape[:-1], 1)


class Nvfp4Weights(QuantizedLinear):
    """W alone: of a layer whose inputs are not quantized."""

    steps = (1, GROUP)

    def __init__(self, in_features: int, out_features: int, bias: bool, *, divisors: bool) -> None:
        """`divisors`: the names and the global scales of compressed-tensors."""
        super().__init__(in_features, out_features, bias)
        self._packed = "weight_packed" if divisors else "weight"
        self._global = "weight_global_scale" if divisors else "weight_scale_2"
        self._divisors = divisors
        self.store(self._packed, (out_features, in_features // 2), torch.uint8)
        self.store("weight_scale", (out_features, in_features // GROUP), torch.float8_e4m3fn)
        self.store(self._global, (), torch.float32)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Numbers times the scales of their groups, exact in 16 bits."""
        of_groups = self.get_buffer("weight_scale").float().repeat_interleave(GROUP, 1)
        return (unpacked(self.get_buffer(self._packed)) * of_groups).to(dtype)

    def tensor_scale(self, name: str) -> Tensor:
        """A scale that is multiplied, 0-dim fp32."""
        stored = self.get_buffer(name)
        return 1 / stored if self._divisors else stored

    def dequantized(self) -> Tensor:
        return self.values(torch.float32) * self.tensor_scale(self._global)


class Nvfp4Linear(Nvfp4Weights, ComputedLinear):
    """Inputs too: the scale of their tensor is calibrated, those of their groups are made as they come."""

    def __init__(self, in_features: int, out_features: int, bias: bool, *, divisors: bool) -> None:
        super().__init__(in_features, out_features, bias, divisors=divisors)
        self._input = "input_global_scale" if divisors else "input_scale"
        self.store(self._input, (), torch.float32)
        self._prepared = False  # the weights' scales are in the order of the tensor cores

    def rounding(self) -> Rounding:
        return partial(_carried, scale=self.tensor_scale(self._input))

    def scales(self) -> Tensor:
        return self.tensor_scale(self._global).view(1, 1)

    def prepare(self) -> None:
        scales = self.get_buffer("weight_scale")
        require_fp4_gemm(scales.device)
        if not self._prepared:
            self.register_buffer("weight_scale", blocked(scales))
            self._prepared = True

    def gemm(self, x: Tensor) -> Tensor:
        require_fp4_gemm(x.device)
        of_weights = self.get_buffer("weight_scale")
        scale = self.tensor_scale(self._input)
        codes, of_groups = by_group(x, scale)
        rows = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()
        return F.scaled_mm(
            rows.view(torch.float4_e2m1fn_x2),
            self.get_buffer(self._packed).view(torch.float4_e2m1fn_x2).t(),
            [blocked(of_groups), scale.view(1)],
            _RECIPE,
            [of_weights if self._prepared else blocked(of_weights), self.tensor_scale(self._global).view(1)],
            _RECIPE,
            _SWIZZLE,
            _SWIZZLE,
            output_dtype=torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32,
        ).to(x.dtype)


def blocked(scales: Tensor) -> Tensor:
    """Scales [R, G] in the order of the tensor cores: tiles of 128 rows and 4 groups, each as 32 × 4 × 4, flat.

    cuBLAS's documentation, "1D block scaling factors layout".
    """
    rows, groups = scales.shape
    padded = F.pad(scales.view(torch.uint8), (0, -groups % 4, 0, -rows % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(torch.float8_e4m3fn).flatten()
