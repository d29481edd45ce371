"""Reads quantized layers as plain weights, on request: what a device without their product serves instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from d2sd.convert.checkpoint.weights import check_values
from d2sd.errors import CheckpointError
from d2sd.modeling.quantized import QuantizedLinear

#: A file, and its tensors by their names in a module.
Files = Iterator[tuple[str, dict[str, Tensor]]]


def dequantized(files: Files, layers: Mapping[str, QuantizedLinear], dtype: torch.dtype, where: Path) -> Files:
    """The tensors with a `weight` in `dtype` in place of those of each quantized layer, in the last one's file.

    `layers` are on the meta device; one may stand for several of the same shape. Scales of K/V are left out: K/V are
    in `dtype` too.
    """
    waiting: dict[str, dict[str, Tensor]] = {name: {} for name in layers}
    for file, tensors in files:
        out: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            layer, _, kind = name.rpartition(".")
            if layer not in layers or kind == "bias":
                if not name.endswith("_cache.scale"):
                    out[name] = tensor
                continue
            parts = waiting[layer]
            parts[kind] = tensor
            if parts.keys() == layers[layer].state_dict().keys() - {"bias"}:
                weight = _weight(layers[layer], waiting.pop(layer), f"{where}: {layer}").to(dtype)
                plain = plain_name(layer, layers[layer])
                check_values(weight, "unquantized", f"{where}: {plain}, dequantized")
                out[plain] = weight
        yield file, out


def plain_name(name: str, layer: QuantizedLinear) -> str:
    """Name of the tensor that the layer `name` is dequantized to."""
    return f"{name}.{layer.weight_name}" if layer.weight_name else name


def _weight(layer: QuantizedLinear, tensors: Mapping[str, Tensor], where: str) -> Tensor:
    layer.load_state_dict(dict(tensors), strict=False, assign=True)
    if fault := layer.fault():
        name, found, expected = fault
        raise CheckpointError("A tensor is not of this layer.", where=f"{where}.{name}", found=found, expected=expected)
    weight = layer.dequantized()
    layer.to("meta")  # its tensors go
    return weight
