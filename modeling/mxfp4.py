"""Experts in MXFP4 (OCP Microscaling), gpt-oss's: E2M1 numbers of which 32 inputs share a power of two.

    W[expert, output, input] = value(blocks, low bits first) * 2^(scales - 127)

They are dequantized, not computed: bf16 holds every value exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.modeling.nvfp4 import unpacked
from d2sd.modeling.quantized import QuantizedLinear
from d2sd.modeling.scheme import MXFP4_GROUP as GROUP

# Shape letters: X experts, O outputs, G groups of 32 inputs.


class Mxfp4Experts(QuantizedLinear):
    """One product of all experts: `blocks` [X, O, G, 16] and `scales` [X, O, G], both uint8.

    Its plain tensor is [X, in, O], as gpt-oss stores it, and has the layer's own name.
    """

    weight_name = ""

    def __init__(self, in_features: int, out_features: int, bias: bool, count: int) -> None:
        super().__init__(in_features, out_features, bias)
        groups = -(-in_features // GROUP)
        self.store("blocks", (count, out_features, groups, GROUP // 2), torch.uint8)
        self.store("scales", (count, out_features, groups), torch.uint8)

    def fault(self) -> tuple[str, object, object] | None:
        fits = self.in_features % GROUP == 0
        return None if fits else ("blocks", f"{self.in_features} inputs", f"a multiple of {GROUP}")

    def dequantized(self) -> Tensor:
        blocks, scales = self.get_buffer("blocks"), self.get_buffer("scales")
        count, outputs, groups = scales.shape
        out = torch.empty(count, groups * GROUP, outputs, dtype=torch.bfloat16)
        for expert in range(count):  # one at a time: a layer of 120B is gigabytes
            weight = torch.ldexp(unpacked(blocks[expert]), scales[expert, ..., None].int() - 127)
            out[expert] = weight.flatten(-2).T
        return out
