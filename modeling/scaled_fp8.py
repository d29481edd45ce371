"""FP8 (E4M3) layers whose inputs are scaled as they come: a scale a token, or a scale a token and 128 inputs.

compressed-tensors' `channel` and `tensor` weights, and the 128 × 128 blocks of DeepSeek's and Qwen's own checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from d2sd.modeling.quantized import ComputedLinear, Rounding, joined
from d2sd.modeling.scheme import BLOCK
from d2sd.plugins.dispatch import use_block_gemm, use_fp8_gemm
from d2sd.plugins.layer_ops import linear
from d2sd.plugins.shared.fp8 import LARGEST, to_pages

# Shape letters: R rows, G groups of inputs that share a scale.

#: Least magnitude that a scale is made for: rows of zeros get a finite one. vLLM's bound.
_LEAST = 1e-10


def by_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., in] -> E4M3 [..., in] and scales [..., 1] fp32: the largest magnitude of a row becomes 448."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=_LEAST) / LARGEST
    return to_pages(x, scale), scale


def by_group(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., in] -> E4M3 [..., in] and scales [..., G] fp32, of 128 inputs each."""
    groups = F.pad(x, (0, -x.shape[-1] % BLOCK)).reshape(*x.shape[:-1], -1, BLOCK)
    values, scale = by_token(groups)
    return values.flatten(-2)[..., : x.shape[-1]], scale.squeeze(-1)


def by_scale(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., in] -> E4M3 [..., in], all by one calibrated scale."""
    return to_pages(x, scale), scale.expand(*x.shape[:-1], 1)


class ScaledFp8Linear(ComputedLinear):
    """W [out, in] in FP8, with a scale a channel or one in all; inputs with a scale a token, or a calibrated one."""

    weight_scale: Tensor  # fp32, [out, 1] or 0-dim
    input_scale: Tensor  # 0-dim fp32, calibrated; missing where a token has a scale of its own

    def __init__(
        self, in_features: int, out_features: int, bias: bool, *, channels: bool = True, calibrated: bool = False
    ) -> None:
        super().__init__(in_features, out_features, bias)
        empty = torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.store("weight_scale", (out_features, 1) if channels else (), torch.float32)
        self._calibrated = calibrated
        if calibrated:
            self.store("input_scale", (), torch.float32)

    def rounding(self) -> Rounding:
        return partial(by_scale, scale=self.input_scale) if self._calibrated else by_token

    def values(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)

    def scales(self) -> Tensor:
        return self.weight_scale.view(1, -1)

    def gemm(self, x: Tensor) -> Tensor | None:
        if not use_fp8_gemm(x):
            return None
        rows, scale = self.rounding()(x)
        out_scale = self.scales().repeat(1, self.out_features // self.weight_scale.numel())
        if x.dtype == torch.bfloat16:  # what PyTorch's row-wise product writes
            scale = scale.clone(memory_format=torch.contiguous_format)
            out: Tensor = torch._scaled_mm(
                rows, self.weight.t(), scale_a=scale, scale_b=out_scale, out_dtype=torch.bfloat16
            )
            return out
        one = torch.ones((), device=x.device)
        sums: Tensor = torch._scaled_mm(rows, self.weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        return (sums * scale * out_scale).to(x.dtype)

    def exact(self, x: Tensor) -> Tensor:
        rows, scale = self.rounding()(x)
        out = (linear(rows, self.weight, dtype=torch.float32) * scale * self.scales()).to(x.dtype)
        return out if self.bias is None else out + self.bias

    @classmethod
    def unjoinable(cls, parts: Sequence[ScaledFp8Linear], *, exact: bool) -> str | None:
        return None

    @classmethod
    def joined(cls, parts: Sequence[ScaledFp8Linear]) -> ScaledFp8Linear:
        first, outputs = parts[0], sum(part.out_features for part in parts)
        with torch.device("meta"):
            whole = cls(first.in_features, outputs, first.bias is not None, calibrated=first._calibrated)
        whole.weight = nn.Parameter(joined([part.weight.detach() for part in parts]), requires_grad=False)
        whole.weight_scale = torch.cat([part.scales().expand(1, part.out_features) for part in parts], 1).t()
        if first._calibrated:
            whole.input_scale = torch.stack([part.input_scale for part in parts]).max()
        whole.bias = _joined_bias(parts)
        return whole


class BlockFp8Linear(ComputedLinear):
    """W [out, in] in FP8, with a scale for every 128 × 128 block; inputs with a scale a token and 128 inputs.

    DeepSeek and Qwen call the scales `weight_scale_inv`, although W is the product with them; compressed-tensors
    `weight_scale`.
    """

    group, steps = BLOCK, (BLOCK, BLOCK)

    def __init__(
        self, in_features: int, out_features: int, bias: bool, *, scale_name: str = "weight_scale_inv"
    ) -> None:
        super().__init__(in_features, out_features, bias)
        empty = torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self._scale_name = scale_name
        self.store(scale_name, (-(-out_features // BLOCK), -(-in_features // BLOCK)), torch.float32)

    @property
    def blocks(self) -> Tensor:
        """[⌈out/128⌉, ⌈in/128⌉] fp32."""
        return self.get_buffer(self._scale_name)

    def rounding(self) -> Rounding:
        return by_group

    def values(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)

    def scales(self) -> Tensor:
        return self.blocks.t().repeat_interleave(BLOCK, 1)[:, : self.out_features]

    def gemm(self, x: Tensor) -> Tensor | None:
        if not use_block_gemm(x, self.in_features, self.out_features):
            return None
        rows, scale = by_group(F.pad(x, (0, 0, 0, -len(x) % 4)))  # cuBLAS takes multiples of four rows
        # Scales of rows are outer-dimension-major; those of blocks too, padded to a multiple of four groups.
        padded = F.pad(self.blocks, (0, -self.blocks.shape[1] % 4))
        wide = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
        out = F.scaled_mm(
            rows,
            self.weight.t(),
            scale.t().clone(memory_format=torch.contiguous_format).t(),
            ScalingType.BlockWise1x128,
            padded.t(),
            ScalingType.BlockWise128x128,
            output_dtype=wide,
        )
        return out[: len(x)].to(x.dtype)

    @classmethod
    def unjoinable(cls, parts: Sequence[BlockFp8Linear], *, exact: bool) -> str | None:
        if exact:
            return super().unjoinable(parts, exact=exact)
        split = any(part.out_features % BLOCK for part in parts[:-1])
        return f"a block of {BLOCK} outputs would be of two layers" if split else None

    @classmethod
    def joined(cls, parts: Sequence[BlockFp8Linear]) -> BlockFp8Linear:
        first, outputs = parts[0], sum(part.out_features for part in parts)
        with torch.device("meta"):
            whole = cls(first.in_features, outputs, first.bias is not None)
        whole.weight = nn.Parameter(joined([part.weight.detach() for part in parts]), requires_grad=False)
        whole.register_buffer("weight_scale_inv", torch.cat([part.blocks for part in parts]))
        whole.bias = _joined_bias(parts)
        return whole


def _joined_bias(parts: Sequence[ComputedLinear]) -> nn.Parameter | None:
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    return nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
