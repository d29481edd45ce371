"""Weights as packed integers: compressed-tensors' `pack-quantized`, AWQ and GPTQ. They are dequantized, not computed.

    W = (q - z) · s          q integers without sign, z zero points, s scales of groups of inputs

                          q, packed in int32               order in an int32       z                      s
    compressed-tensors    weight_packed [out, in/8]        ascending               [out/8, G] or 8        [out, G]
    AWQ                   qweight       [in, out/8]        0 2 4 6 1 3 5 7         [G, out/8]             [G, out]
    GPTQ                  qweight       [in/8, out]        ascending               [G, out/8] + 1         [G, out]

for four bits; for eight, four integers an int32. Ascending: the first integer has the lowest bits. GPTQ stores its zero
points less one (its `gptq_v2` does not). Inputs may be in any order of groups (`g_idx`) in GPTQ and compressed-tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.modeling.quantized import QuantizedLinear

# Shape letter: G groups of inputs that share a scale.

#: Output of each four bits of an int32 of AWQ, lowest bits first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpacked(packed: Tensor, bits: int, axis: int) -> Tensor:
    """int32 [..., n/f, ...] -> integers [..., n, ...] without sign, the lowest bits first; f = 32 / bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    spread = packed.movedim(axis, -1)[..., None] >> shifts & (1 << bits) - 1
    return spread.flatten(-2).movedim(-1, axis)


class PackedIntLinear(QuantizedLinear):
    """compressed-tensors' `pack-quantized`; a group of None is a scale a channel."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        bits: int,
        group: int | None,
        zero_points: bool,
        ordered: bool = False,
    ) -> None:
        """`ordered`: a tensor says which group an input is of."""
        super().__init__(in_features, out_features, bias)
        self._bits, self._group, self._zero_points, self._ordered = bits, group or in_features, zero_points, ordered
        each, groups = 32 // bits, -(-in_features // self._group)
        self.store("weight_packed", (out_features, -(-in_features // each)), torch.int32)
        self.store("weight_scale", (out_features, groups), torch.float32)
        self.store("weight_shape", (2,), torch.int64)
        if zero_points:
            self.store("weight_zero_point", (-(-out_features // each), groups), torch.int32)
        if ordered:
            self.store("weight_g_idx", (in_features,), torch.int32)

    def fault(self) -> tuple[str, object, object] | None:
        shape, found = [self.out_features, self.in_features], self.get_buffer("weight_shape").tolist()
        if found != shape:
            return "weight_shape", found, shape
        return _outside(self, "weight_g_idx", self.get_buffer("weight_scale").shape[1]) if self._ordered else None

    def dequantized(self) -> Tensor:
        packed, scale = self.get_buffer("weight_packed"), self.get_buffer("weight_scale").float()
        weight = unpacked(packed, self._bits, 1)[:, : self.in_features].float()
        zero = torch.full_like(scale, 1 << self._bits - 1)
        if self._zero_points:
            zero = unpacked(self.get_buffer("weight_zero_point"), self._bits, 0)[: self.out_features].float()
        if self._ordered:
            group = self.get_buffer("weight_g_idx").long()
        else:
            group = _in_order(self.in_features, self._group, packed)
        return (weight - zero[:, group]) * scale[:, group]


class AwqLinear(QuantizedLinear):
    """AWQ's GEMM layout, four bits."""

    def __init__(self, in_features: int, out_features: int, bias: bool, *, group: int | None) -> None:
        super().__init__(in_features, out_features, bias)
        self._group = group or in_features
        groups = -(-in_features // self._group)
        self.store("qweight", (in_features, out_features // 8), torch.int32)
        self.store("qzeros", (groups, out_features // 8), torch.int32)
        self.store("scales", (groups, out_features), torch.float32)

    def dequantized(self) -> Tensor:
        weight, zero = (_awq_order(unpacked(self.get_buffer(name), 4, 1)).float() for name in ("qweight", "qzeros"))
        group = _in_order(self.in_features, self._group, weight)
        return ((weight - zero[group]) * self.get_buffer("scales").float()[group]).t().contiguous()


def _awq_order(integers: Tensor) -> Tensor:
    """[n, out] in the order of the bits -> in the order of outputs."""
    place = torch.tensor(AWQ_ORDER, device=integers.device).argsort()
    return integers.view(len(integers), -1, 8)[..., place].flatten(1)


class GptqLinear(QuantizedLinear):
    """GPTQ's layout; `less_one`: zero points are stored less one."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, *, bits: int, group: int | None, less_one: bool
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self._bits, self._less_one = bits, less_one
        each, groups = 32 // bits, -(-in_features // (group or in_features))
        self.store("qweight", (in_features // each, out_features), torch.int32)
        self.store("qzeros", (groups, out_features // each), torch.int32)
        self.store("scales", (groups, out_features), torch.float32)
        self.store("g_idx", (in_features,), torch.int32)

    def fault(self) -> tuple[str, object, object] | None:
        return _outside(self, "g_idx", len(self.get_buffer("scales")))

    def dequantized(self) -> Tensor:
        weight = unpacked(self.get_buffer("qweight"), self._bits, 0).float()
        zero = unpacked(self.get_buffer("qzeros"), self._bits, 1).float() + self._less_one
        group = self.get_buffer("g_idx").long()
        return ((weight - zero[group]) * self.get_buffer("scales").float()[group]).t().contiguous()


def _outside(layer: QuantizedLinear, name: str, groups: int) -> tuple[str, object, object] | None:
    """A group of an input that there is not."""
    low, high = (int(end) for end in layer.get_buffer(name).aminmax())
    return None if low >= 0 and high < groups else (name, f"{low} to {high}", f"0 to {groups - 1}")


def _in_order(inputs: int, group: int, like: Tensor) -> Tensor:
    """Group of each input [in], where groups are in a row."""
    return torch.arange(inputs, device=like.device) // group
