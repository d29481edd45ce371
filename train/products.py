"""The type of a training's matrix products: bf16 where the recipe asks for it and the device multiplies it."""

from __future__ import annotations

from typing import Literal

import torch


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the device has bf16 products. CPUs that lack them emulate each, at a fiftieth of the speed of fp32."""
    if device.type != "cpu":
        return True
    known: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return known and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product_dtype(precision: Literal["bf16", "fp32"], device: torch.device) -> torch.dtype:
    """The type of matrix products under a recipe's `precision`."""
    return torch.bfloat16 if precision == "bf16" and multiplies_bf16(device) else torch.float32
