"""Readers of `quantization_config` by its `quant_method`: compressed-tensors, fp8 (DeepSeek, Qwen), mxfp4.

Every key that changes numbers is checked. Others, which say how the checkpoint was made, are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from d2sd.convert.checkpoint import schemes
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.schemes import EVERY, Quantization
from d2sd.errors import CheckpointError
from d2sd.modeling.scheme import BLOCK, Scheme

_FIX = (
    "start from the checkpoint before it was quantized, from an FP8 one of this model, or from one that"
    " transformers has dequantized: model.dequantize().save_pretrained(...)"
)
_FLOAT8 = {"num_bits": 8, "type": "float"}
_FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_TOKEN = _FLOAT8 | {"strategy": "token", "dynamic": True}
_CALIBRATED = _FLOAT8 | {"strategy": "tensor", "dynamic": False}
#: compressed-tensors: what `weights` and `input_activations` of a group say -> the scheme.
_GROUPS: tuple[tuple[Mapping[str, Any], Mapping[str, Any] | None, Scheme], ...] = (
    (_FLOAT8 | {"strategy": "tensor"}, _CALIBRATED, schemes.FP8),
    (_FLOAT8 | {"strategy": "channel"}, _CALIBRATED, schemes.FP8_CHANNELS),
    (_FLOAT8 | {"strategy": "tensor"}, _TOKEN, schemes.FP8_TENSOR_DYNAMIC),
    (_FLOAT8 | {"strategy": "channel"}, _TOKEN, schemes.FP8_DYNAMIC),
    (
        _FLOAT8 | {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
        _FLOAT8 | {"strategy": "group", "group_size": BLOCK, "dynamic": True},
        schemes.FP8_BLOCKS_COMPRESSED,
    ),
    (_FLOAT8 | {"strategy": "tensor"}, None, schemes.FP8_TENSOR_WEIGHTS),
    (_FLOAT8 | {"strategy": "channel"}, None, schemes.FP8_WEIGHTS),
    (_FLOAT4, _FLOAT4 | {"dynamic": "local"}, schemes.NVFP4_COMPRESSED),
    (_FLOAT4, None, schemes.NVFP4_WEIGHTS_COMPRESSED),
)
#: Most names of modules in a list, and characters in one: published lists are far below.
_MOST, _LONGEST = 2048, 1000
#: A regular expression with at most two counts, of one digit: `regex` compiles a copy for each repetition.
_EXPANDED = re.compile(r"[^{]*(?:\{\d?,?\d?\}[^{]*){0,2}")
_NEUTRAL: tuple[object, ...] = ({}, None)


def read_dialect(part: HFConfig) -> Quantization:
    """Read a `quantization_config` of another tool than ModelOpt; raises `CheckpointError` naming the key."""
    method = part.values.get("quant_method")
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise part.refuse(
            "This quantization is not supported.", "quant_method", ", ".join(["modelopt", *_READERS]), _FIX
        )
    return reader(part)


def _compressed(part: HFConfig) -> Quantization:
    part.only("quantization_status", "compressed", "frozen", None)
    part.only("transform_config", *_NEUTRAL)  # rotations of weights and inputs
    if part.get("sparsity_config", dict, {}).get("format", "dense") != "dense":
        raise part.refuse("Sparse weights are not supported.", "sparsity_config", "format dense", _FIX)
    kv = part.values.get("kv_cache_scheme")
    if kv is not None and not (isinstance(kv, dict) and _says(kv, _CALIBRATED) and kv.get("symmetric", True) is True):
        raise part.refuse(
            "This K/V quantization is not supported.", "kv_cache_scheme", "FP8 with a scale a tensor, or null"
        )
    groups = []
    for name, values in part.get("config_groups", dict).items():
        where = f"{part.where}: config_groups.{name}"
        if not isinstance(values, dict):
            raise CheckpointError("A group is not a dictionary.", where=where, found=type(values).__name__)
        group = HFConfig(values, where)
        groups.append((_compressed_scheme(group), read_patterns(group, "targets")))
    if not groups:
        raise part.refuse("No group of layers is described.", "config_groups", "one group or more")
    ignored = read_patterns(part, "ignore")
    version = part.get("version", str, "unknown")
    return Quantization(ignored, kv is not None, ("compressed-tensors", version), tuple(groups), "regex", part.values)


def _compressed_scheme(group: HFConfig) -> Scheme:
    group.only("output_activations", None)
    weights, inputs = group.get("weights", dict), group.get("input_activations", dict, {}) or None
    plain = HFConfig(weights, f"{group.where}.weights")
    plain.only("dynamic", False, None)
    for expected, of_inputs, scheme in _GROUPS:
        if _says(weights, expected) and _inputs_say(inputs, of_inputs):
            plain.only("symmetric", True, None)
            return scheme
    raise group.refuse(
        "This quantization is not supported.",
        "input_activations" if any(_says(weights, expected) for expected, _, _ in _GROUPS) else "weights",
        "FP8 by tensor, channel or blocks, or NVFP4",
        _FIX,
    )


def _fp8(part: HFConfig) -> Quantization:
    part.only("fmt", "e4m3", "float8_e4m3fn", None)
    part.only("scale_fmt", None, "float")  # ue8m0 rounds the scales of inputs to powers of two
    dynamic = part.required("activation_scheme", "dynamic", "static") == "dynamic"
    part.only("dequantize", False, None)
    ignored = (*read_patterns(part, "modules_to_not_convert"), *read_patterns(part, "ignored_layers"))
    if part.values.get("weight_block_size") is None:
        scheme = schemes.FP8_TENSOR_DYNAMIC if dynamic else schemes.FP8
    else:
        part.only("weight_block_size", [BLOCK, BLOCK])
        part.only("activation_scheme", "dynamic")
        scheme = schemes.FP8_BLOCKS
    return Quantization(ignored, False, ("fp8", "unknown"), ((scheme, (EVERY,)),), "part", part.values)


def _mxfp4(part: HFConfig) -> Quantization:
    """gpt-oss: experts alone."""
    part.only("dequantize", False, None)
    ignored = tuple(name if "*" in name else f"{name}*" for name in read_patterns(part, "modules_to_not_convert"))
    groups = ((schemes.MXFP4, ("*.mlp.experts.*",)),)
    return Quantization(ignored, False, ("mxfp4", "unknown"), groups, "wildcard", part.values)


_READERS: Mapping[str, Callable[[HFConfig], Quantization]] = {
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}


def _says(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether all of `expected` is found; types too, because True is 1."""
    return all(
        key in found and found[key] == value and type(found[key]) is type(value) for key, value in expected.items()
    )


def _inputs_say(found: Mapping[str, Any] | None, expected: Mapping[str, Any] | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return _says(found, expected) and found.get("symmetric", True) is True


def read_patterns(part: HFConfig, key: str) -> tuple[str, ...]:
    """Names of modules, with wildcards or behind `re:` a regular expression, so few that matching them has a bound."""
    names = part.get(key, list, [])
    if not all(isinstance(name, str) and len(name) <= _LONGEST for name in names) or len(names) > _MOST:
        expected = f"at most {_MOST:,} names of modules of up to {_LONGEST} characters"
        raise part.refuse("This list may hold only names.", key, expected)
    for name in names:
        if name.startswith("re:"):
            try:
                re.compile(name[3:])
            except (re.error, RecursionError, OverflowError) as error:
                message = f"This is not a regular expression ({error})."
                raise part.refuse(message, key, "patterns that Python reads") from None
            if not _EXPANDED.fullmatch(name):
                raise part.refuse("This regular expression may take very long.", key, "at most two short {counts}")
    return tuple(names)
