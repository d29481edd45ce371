"""The description of a quantized checkpoint: ModelOpt's unified layout is read and written here, others are read.

`hf_quant_config.json` and `quantization_config` in config.json contain the same description, because readers differ in
which of the two they read. Other tools write `quantization_config` alone, which says by `quant_method` whose it is:
compressed-tensors, fp8 (DeepSeek, Qwen), mxfp4; a copy keeps it as it is. Every key that changes numbers is checked.
Others, which say how the checkpoint was made, are not.
ModelOpt has FP8 and NVFP4 (`schemes.py`); K/V have `k_scale` and `v_scale` at their projections.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from d2sd.convert.checkpoint import schemes
from d2sd.convert.checkpoint.headers import Shapes, stored_as
from d2sd.convert.checkpoint.hf_config import HFConfig, text_config, without_prefix
from d2sd.convert.checkpoint.schemes import EVERY
from d2sd.convert.checkpoint.schemes import Quantization as Quantization  # for all who read one here
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
        same = inputs is of_inputs
        if inputs is not None and of_inputs is not None:
            same = _says(inputs, of_inputs) and inputs.get("symmetric", True) is True
        if same and _says(weights, expected):
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


FILE, KEY = "hf_quant_config.json", "quantization_config"
_MODELOPT_8 = {"dynamic": False, "num_bits": 8, "type": "float"}
_MODELOPT_4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
#: ModelOpt: `quant_algo` -> the scheme, the size of its groups, and a group of layers in config.json.
_ALGORITHMS: dict[str, tuple[Scheme, int | None, dict[str, Any]]] = {
    "FP8": (schemes.FP8, None, {"input_activations": _MODELOPT_8, "weights": _MODELOPT_8, "targets": [EVERY]}),
    "NVFP4": (schemes.NVFP4, 16, {"input_activations": _MODELOPT_4, "weights": _MODELOPT_4, "targets": [EVERY]}),
    "W4A16_NVFP4": (schemes.NVFP4_WEIGHTS, 16, {"weights": _MODELOPT_4, "targets": [EVERY]}),
}


def read_quantization(directory: Path, config: HFConfig) -> Quantization | None:
    """Read how the checkpoint in `directory` is quantized; None if it is not.

    Raises `CheckpointError` for what d2sd does not read, and if two descriptions disagree.
    """
    config = text_config(config)
    inline = read_inline(config.part(KEY)) if config.values.get(KEY) is not None else None
    path = directory / FILE
    if not path.is_file():
        return inline
    separate = _read_file(HFConfig(without_prefix(HFConfig.of_file(path).values), str(path)))
    if inline is not None and _facts(inline) != _facts(separate):
        raise CheckpointError(
            "Two files describe the quantization differently.",
            where=f"{path} and {config.where}: {KEY}",
            found=f"{_summary(separate)}; {_summary(inline)}",
            expected="the same",
        )
    return separate


def read_drafter_quantization(directory: Path, config: HFConfig) -> Quantization | None:
    """`read_quantization` for a drafter, of which only FP8 is served that ModelOpt describes or could."""
    quantization = read_quantization(directory, config)
    if quantization is not None and any(scheme != schemes.FP8 for scheme, _ in quantization.groups):
        raise CheckpointError(
            "Drafters in this quantization are not served.",
            where=f"{directory}: {FILE} or {KEY}",
            found=quantization.text,
            expected="FP8 with one calibrated scale a tensor, as ModelOpt writes it",
            fix="name the drafter before it was quantized",
        )
    return quantization


def refuse_unserved(
    quantization: Quantization | None, shapes: Shapes, where: Path, precision: str, size: str | None = None
) -> None:
    """Raise `CheckpointError` for tensors `shapes` of a target without a product.

    `precision` and `size` describe both ways to hold them.
    """
    if quantization is None:
        return
    experts = any(".experts." in name and stored_as(name, shapes) != "unquantized" for name in shapes)
    unserved = f"experts in {quantization.text}" if experts else quantization.unserved
    if unserved is not None:
        raise CheckpointError(
            "d2sd has no product for this quantization.",
            where=f"{where}: {KEY}",
            found=unserved + (f", {size} as stored" if size else ""),
            expected="FP8 or NVFP4, of weights and inputs, and experts in 16 bits",
            fix=f"set target.dequantize to true, to read its weights in {precision}; or name "
            + ("the checkpoint before it was quantized" if experts else "an FP8 checkpoint of this model"),
        )


def described(quantization: Quantization) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the contents of `hf_quant_config.json`, if the checkpoint has one, and of `quantization_config`."""
    if quantization.source is not None:
        return None, dict(quantization.source)
    ((scheme, _),) = quantization.groups
    algorithm = next(name for name, (row, _, _) in _ALGORITHMS.items() if row == scheme)
    group_size, group = _ALGORITHMS[algorithm][1:]
    producer = dict(zip(("name", "version"), quantization.producer, strict=True))
    exclude = list(quantization.exclude)
    separate = {
        "producer": producer,
        "quantization": {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": "FP8" if quantization.kv else None,
            **({} if group_size is None else {"group_size": group_size}),
            "exclude_modules": exclude,
        },
    }
    inline: dict[str, Any] = {
        "config_groups": {"group_0": group},
        "ignore": exclude,
        "quant_algo": algorithm,
        "producer": producer,
        "quant_method": "modelopt",
    }
    return separate, inline | ({"kv_cache_scheme": _MODELOPT_8} if quantization.kv else {})


def _read_file(file: HFConfig) -> Quantization:
    part = file.part("quantization")
    scheme, group_size, _ = _algorithm(part)
    if part.values.get("kv_cache_quant_algo") not in (None, "FP8"):
        raise part.refuse("This K/V quantization is not supported.", "kv_cache_quant_algo", "FP8 or null")
    part.only("group_size", group_size, None)
    part.only("has_zero_point", False, None)
    part.only("pre_quant_scale", False, None)
    kv = part.values.get("kv_cache_quant_algo") == "FP8"
    return Quantization(read_patterns(part, "exclude_modules"), kv, _producer(file), ((scheme, (EVERY,)),))


def read_inline(part: HFConfig) -> Quantization:
    """Read `quantization_config`; raises `CheckpointError` naming the key."""
    if part.values.get("quant_method") != "modelopt":
        return read_dialect(part)
    scheme, _, expected = _algorithm(part)
    part.only("kv_cache_scheme", None, _MODELOPT_8)
    for group in part.get("config_groups", dict, {}).values():
        if group != expected:
            raise part.refuse("This quantization is not supported.", "config_groups", json.dumps(expected))
    kv = part.values.get("kv_cache_scheme") is not None
    return Quantization(read_patterns(part, "ignore"), kv, _producer(part), ((scheme, (EVERY,)),))


def _algorithm(part: HFConfig) -> tuple[Scheme, int | None, dict[str, Any]]:
    name = part.values.get("quant_algo")
    if not isinstance(name, str) or name not in _ALGORITHMS:
        fix = "start from the checkpoint from before it was quantized"
        raise part.refuse("This quantization is not supported.", "quant_algo", ", ".join(_ALGORITHMS), fix)
    return _ALGORITHMS[name]


def _producer(config: HFConfig) -> tuple[str, str]:
    part = HFConfig(config.get("producer", dict, {}), f"{config.where}: producer")
    return part.get("name", str, "unknown"), part.get("version", str, "unknown")


def _facts(quantization: Quantization) -> tuple[object, ...]:
    return set(quantization.exclude), quantization.kv, quantization.groups


def _summary(quantization: Quantization) -> str:
    return f"{quantization.text}, all but {', '.join(quantization.exclude)}{' and K/V' if quantization.kv else ''}"
