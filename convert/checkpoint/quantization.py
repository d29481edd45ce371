"""The description of a quantized checkpoint: ModelOpt's unified layout is read and written here, others are read.

`hf_quant_config.json` and `quantization_config` in config.json contain the same description, because readers differ in
which of the two they read. Other tools write `quantization_config` alone (`dialects.py`); a copy keeps it as it is.
ModelOpt has FP8 and NVFP4 (`schemes.py`); K/V have `k_scale` and `v_scale` at their projections.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from d2sd.convert.checkpoint import schemes
from d2sd.convert.checkpoint.dialects import read_dialect, read_patterns
from d2sd.convert.checkpoint.headers import Shapes, stored_as
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.nested import text_config, without_prefix
from d2sd.convert.checkpoint.schemes import EVERY
from d2sd.convert.checkpoint.schemes import Quantization as Quantization  # for all who read one here
from d2sd.errors import CheckpointError
from d2sd.modeling.scheme import Scheme

FILE, KEY = "hf_quant_config.json", "quantization_config"
_FLOAT8 = {"dynamic": False, "num_bits": 8, "type": "float"}
_FLOAT4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
#: ModelOpt: `quant_algo` -> the scheme, the size of its groups, and a group of layers in config.json.
_ALGORITHMS: dict[str, tuple[Scheme, int | None, dict[str, Any]]] = {
    "FP8": (schemes.FP8, None, {"input_activations": _FLOAT8, "weights": _FLOAT8, "targets": [EVERY]}),
    "NVFP4": (schemes.NVFP4, 16, {"input_activations": _FLOAT4, "weights": _FLOAT4, "targets": [EVERY]}),
    "W4A16_NVFP4": (schemes.NVFP4_WEIGHTS, 16, {"weights": _FLOAT4, "targets": [EVERY]}),
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
    return separate, inline | ({"kv_cache_scheme": _FLOAT8} if quantization.kv else {})


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
    part.only("kv_cache_scheme", None, _FLOAT8)
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
