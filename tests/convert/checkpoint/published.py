"""Checkpoints with the names, shapes and descriptions of published ones, of tiny models; and what their numbers mean.

Everything is written from the formats' definitions, number by number: nothing here calls what it is to check.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from tests.convert.helpers import hf_fields, hf_tensors, write_target_dir
from tests.tiny import tiny_decoder

#: E2M1 by its code: sign, two bits of exponent with bias 1, one bit of fraction; no exponent, no leading one.
E2M1 = [
    (-1) ** sign * (fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1))
    for sign, exponent, fraction in product((0, 1), range(4), (0, 1))
]
BLOCK, GROUP, LAYERS = 128, 16, 1
#: config.json of models as they are on the hub.
CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_configs.json").read_text())
Tensors = dict[str, Tensor]
#: A layer's tensors as lists, a row and a column of its weight -> the number there.
Number = Callable[[dict[str, Any], int, int], float]


@dataclass(frozen=True, eq=False)
class Published:
    """A layout: what config.json says, how a layer [out, in] is stored, and the number at a place of it."""

    name: str
    config: dict[str, Any]
    store: Callable[[Tensor], Tensors]
    number: Number
    #: Inputs [R, in] in fp64 -> as they are multiplied; None: the layout has no product in d2sd.
    rounded: Callable[[Tensors, Tensor], Tensor] | None
    hidden: int = 32
    #: Scales of K and V of a layer, by name behind `self_attn.`
    kv: dict[str, Tensor] | None = None

    def decoder(self) -> Decoder:
        """The model that is quantized and stored; blocks and groups do not divide all its sizes."""
        return tiny_decoder("qwen3", layers=LAYERS, hidden=self.hidden, tie=False)

    def write(self, folder: Path, decoder: Decoder | None = None) -> Path:
        decoder = decoder or self.decoder()
        write_target_dir(folder, decoder)
        tensors: Tensors = {}
        for name, tensor in hf_tensors(decoder).items():
            if not name.endswith("_proj.weight"):
                tensors[name] = tensor.to(torch.bfloat16)
                continue
            layer = name.removesuffix("weight")
            tensors |= {layer + part: value for part, value in self.store(tensor).items()}
        for index, (name, scale) in product(range(LAYERS), (self.kv or {}).items()):
            tensors[f"model.layers.{index}.self_attn.{name}"] = scale
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(hf_fields(decoder) | {"quantization_config": self.config}))
        return folder

    def plain(self, stored: Tensors, out: int, inputs: int) -> Tensor:
        """[out, in] in fp64, number by number."""
        lists = {
            name: (tensor.float() if tensor.is_floating_point() else tensor).tolist() for name, tensor in stored.items()
        }
        rows = [[self.number(lists, row, column) for column in range(inputs)] for row in range(out)]
        return torch.tensor(rows, dtype=torch.float64)


def e4m3(x: Tensor) -> Tensor:
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn)


def of_token(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).float() / 448
    return e4m3(x.float() / scale).double() * scale.double()


def of_token_and_group(x: Tensor) -> Tensor:
    return torch.cat([of_token(part) for part in torch.split(x, BLOCK, -1)], -1)


def nearest_e2m1(x: float) -> float:
    """Rounds to nearest; a tie goes to the number whose fraction bit is 0."""
    return math.copysign(min(range(8), key=lambda code: (abs(E2M1[code] - abs(x)), code % 2)), x) if x else 0.0


def of_nvfp4(x: Tensor, scale: float) -> Tensor:
    out = torch.empty_like(x)
    for row, start in product(range(len(x)), range(0, x.shape[1], GROUP)):
        part = x[row, start : start + GROUP]
        group = e4m3(part.abs().max() / 6 / scale).double().item() * scale
        for at, value in enumerate(part.tolist(), start):
            code = nearest_e2m1(value / group) if group else 0.0
            out[row, at] = math.copysign(E2M1[int(abs(code))], code) * group
    return out


def _fp8(weight: Tensor, scale: Tensor) -> Tensor:
    return e4m3(weight / scale)


def _channels(weight: Tensor) -> Tensors:
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    return {"weight": _fp8(weight, scale.float()), "weight_scale": scale}


def _tensor(weight: Tensor) -> Tensors:
    scale = (weight.abs().max() / 448).view(1)
    return {"weight": _fp8(weight, scale), "weight_scale": scale}


def _calibrated(weight: Tensor) -> Tensors:
    return _tensor(weight) | {"input_scale": torch.tensor([8 / 448])}


def _blocks(name: str) -> Callable[[Tensor], Tensors]:
    def store(weight: Tensor) -> Tensors:
        out, inputs = weight.shape
        scale, fp8 = torch.empty(-(-out // BLOCK), -(-inputs // BLOCK)), torch.empty_like(weight)
        for i, j in product(range(scale.shape[0]), range(scale.shape[1])):
            at = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scale[i, j] = (weight[at].abs().max() / 448).to(torch.bfloat16)
            fp8[at] = _fp8(weight[at], scale[i, j]).float()
        return {"weight": e4m3(fp8), name: scale.to(torch.bfloat16)}

    return store


def _nvfp4(*, compressed: bool, inputs: bool) -> Callable[[Tensor], Tensors]:
    def store(weight: Tensor) -> Tensors:
        out, width = weight.shape
        scale = (weight.abs().max() / (6 * 448)).item()
        groups = torch.empty(out, width // GROUP)
        packed = torch.zeros(out, width // 2, dtype=torch.uint8)
        for row, column in product(range(out), range(width)):
            if column % GROUP == 0:
                largest = weight[row, column : column + GROUP].abs().max() / 6 / scale
                groups[row, column // GROUP] = e4m3(largest).float()
            group = groups[row, column // GROUP].item() * scale
            code = nearest_e2m1(weight[row, column].item() / group)
            bits = int(abs(code)) + 8 * (math.copysign(1, code) < 0)
            packed[row, column // 2] += bits << 4 * (column % 2)
        if compressed:
            found = {
                "weight_packed": packed,
                "weight_scale": e4m3(groups),
                "weight_global_scale": torch.tensor([1 / scale]),
            }
            return found | ({"input_global_scale": torch.tensor([6 * 448 / 8.0])} if inputs else {})
        found = {"weight": packed, "weight_scale": e4m3(groups), "weight_scale_2": torch.tensor(scale)}
        return found | ({"input_scale": torch.tensor(8.0 / (6 * 448))} if inputs else {})

    return store


def _nvfp4_number(stored: dict[str, Any], row: int, column: int) -> float:
    byte: int = stored["weight_packed" if "weight_packed" in stored else "weight"][row][column // 2]
    number: float = E2M1[byte >> 4 if column % 2 else byte & 15] * float(stored["weight_scale"][row][column // GROUP])
    if "weight_global_scale" in stored:
        return number / float(stored["weight_global_scale"][0])
    return number * float(stored["weight_scale_2"])


def _nvfp4_inputs(stored: Tensors, x: Tensor) -> Tensor:
    if "input_global_scale" in stored:
        return of_nvfp4(x, 1 / stored["input_global_scale"].item())
    return of_nvfp4(x, stored["input_scale"].item())


def _scaled_number(stored: dict[str, Any], row: int, column: int) -> float:
    scale = stored["weight_scale"]
    return float(stored["weight"][row][column] * (scale[0] if len(scale) == 1 else scale[row][0]))


def _block_number(name: str) -> Number:
    def number(stored: dict[str, Any], row: int, column: int) -> float:
        return float(stored["weight"][row][column] * stored[name][row // BLOCK][column // BLOCK])

    return number


def _quantized(**changes: Any) -> dict[str, Any]:
    """`weights` or `input_activations` as llm-compressor writes them."""
    empty = dict.fromkeys(("actorder", "block_structure", "group_size", "observer")) | {"observer_kwargs": {}}
    return empty | {"dynamic": False, "num_bits": 8, "symmetric": True, "type": "float"} | changes


def compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, kv: dict[str, Any] | None = None
) -> dict[str, Any]:
    """`quantization_config` as llm-compressor writes it."""
    group = {"weights": weights, "input_activations": inputs, "output_activations": None, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*nothing$"],
        "kv_cache_scheme": kv,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.11.0",
    }


_FLOAT4 = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
_TOKEN = _quantized(strategy="token", dynamic=True)
_STATIC = _quantized(strategy="tensor")
_MODELOPT4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}


def _modelopt(**more: Any) -> dict[str, Any]:
    group = {"input_activations": _MODELOPT4, "weights": _MODELOPT4, "targets": ["Linear"]}
    producer = {"name": "modelopt", "version": "0.47.0"}
    return {
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quant_algo": "NVFP4",
        "producer": producer,
        "quant_method": "modelopt",
        **more,
    }


def _by(rounding: Callable[[Tensor], Tensor]) -> Callable[[Tensors, Tensor], Tensor]:
    return lambda _, x: rounding(x)


def _by_scale(stored: Tensors, x: Tensor) -> Tensor:
    scale = stored["input_scale"].item()
    return e4m3(x / scale).double() * scale


def _compressed(name: str, weights: dict[str, Any], inputs: dict[str, Any] | None, **changes: Any) -> Published:
    """FP8 by llm-compressor; a scale a channel, unless `changes` say otherwise."""
    form = "naive-quantized" if inputs is None else "float-quantized"
    config = compressed(form, _quantized(**weights), inputs, changes.pop("scheme", None))
    fields: dict[str, Any] = {"store": _channels, "number": _scaled_number, "rounded": _by(of_token)}
    return Published(name, config, **fields | changes)


_BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
_CHANNEL, _TENSOR = {"strategy": "channel"}, {"strategy": "tensor"}
_BLOCK = {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
_GROUP = _quantized(strategy="group", group_size=BLOCK, dynamic=True)
_NVFP4 = "nvfp4-pack-quantized", _quantized(**_FLOAT4)
_KV = {"k_scale": torch.tensor([0.05]), "v_scale": torch.tensor([0.03])}
_OF_BLOCKS: dict[str, Any] = {"rounded": _by(of_token_and_group), "hidden": 144}


def _channels_calibrated(weight: Tensor) -> Tensors:
    return _channels(weight) | {"input_scale": torch.tensor([8 / 448])}


def _in_blocks(name: str) -> dict[str, Any]:
    return {"store": _blocks(name), "number": _block_number(name), **_OF_BLOCKS}


LAYOUTS = (
    _compressed("fp8-dynamic", _CHANNEL, _TOKEN),
    _compressed("fp8-tensor-dynamic", _TENSOR, _TOKEN, store=_tensor),
    _compressed("fp8-static-kv", _TENSOR, _STATIC, scheme=_STATIC, store=_calibrated, rounded=_by_scale, kv=_KV),
    _compressed("fp8-channels-static", _CHANNEL, _STATIC, store=_channels_calibrated, rounded=_by_scale),
    Published("fp8-blocks", _BLOCKS, **_in_blocks("weight_scale_inv")),
    _compressed("fp8-blocks-compressed", _BLOCK, _GROUP, **_in_blocks("weight_scale")),
    Published("nvfp4-modelopt", _modelopt(), _nvfp4(compressed=False, inputs=True), _nvfp4_number, _nvfp4_inputs),
    Published(
        "nvfp4-compressed",
        compressed(*_NVFP4, _quantized(**_FLOAT4 | {"dynamic": "local"})),
        _nvfp4(compressed=True, inputs=True),
        _nvfp4_number,
        _nvfp4_inputs,
    ),
    Published("nvfp4-weights", compressed(*_NVFP4, None), _nvfp4(compressed=True, inputs=False), _nvfp4_number, None),
    _compressed("fp8-weights", _CHANNEL, None, rounded=None),
)
SERVED = tuple(layout for layout in LAYOUTS if layout.rounded is not None)
