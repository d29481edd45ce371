"""The description of FP8 in a checkpoint: ModelOpt's unified layout, read strictly and written in full.

`hf_quant_config.json` and `quantization_config` in config.json contain the same description, because readers differ in
which of the two they read. Weights are E4M3 with a `weight_scale` and an `input_scale` next to each; K/V have `k_scale`
and `v_scale` at their projections.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.errors import CheckpointError

FILE, KEY = "hf_quant_config.json", "quantization_config"
_FLOAT8 = {"dynamic": False, "num_bits": 8, "type": "float"}


@dataclass(frozen=True, slots=True)
class Quantization:
    """FP8 of every linear layer that no pattern of `exclude` matches (`*` is any text), and of K/V where `kv`."""

    exclude: tuple[str, ...]
    kv: bool
    producer: tuple[str, str]  # name and version

    def of(self, names: Iterable[str], prefix: str = "") -> list[str]:
        """Return those of the linear layers `names` that are FP8; patterns match `prefix` + name."""
        return [name for name in names if not any(fnmatchcase(prefix + name, pattern) for pattern in self.exclude)]


def read_quantization(directory: Path, config: HFConfig) -> Quantization | None:
    """Read the description of FP8 in `directory` and its config.json; None if there is none.

    Raises `CheckpointError` for any other quantization, and if the two disagree.
    """
    inline = _read_inline(config.part(KEY)) if config.values.get(KEY) is not None else None
    path = directory / FILE
    if not path.is_file():
        return inline
    separate = _read_file(HFConfig.of_file(path))
    if inline is not None and (set(inline.exclude), inline.kv) != (set(separate.exclude), separate.kv):
        raise CheckpointError(
            "Two files describe the quantization differently.",
            where=f"{path} and {config.where}: {KEY}",
            found=f"{_summary(separate)}; {_summary(inline)}",
            expected="the same",
        )
    return separate


def described(quantization: Quantization) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of `hf_quant_config.json`, and of `quantization_config` in config.json."""
    producer = dict(zip(("name", "version"), quantization.producer, strict=True))
    exclude = list(quantization.exclude)
    separate = {
        "producer": producer,
        "quantization": {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8" if quantization.kv else None,
            "exclude_modules": exclude,
        },
    }
    inline: dict[str, Any] = {
        "config_groups": {"group_0": {"input_activations": _FLOAT8, "weights": _FLOAT8, "targets": ["Linear"]}},
        "ignore": exclude,
        "quant_algo": "FP8",
        "producer": producer,
        "quant_method": "modelopt",
    }
    return separate, inline | ({"kv_cache_scheme": _FLOAT8} if quantization.kv else {})


def _read_file(file: HFConfig) -> Quantization:
    part = file.part("quantization")
    _only_fp8(part)
    if part.values.get("kv_cache_quant_algo") not in (None, "FP8"):
        raise part.refuse("This K/V quantization is not supported.", "kv_cache_quant_algo", "FP8 or null")
    part.only("group_size", None)
    part.only("has_zero_point", False, None)
    part.only("pre_quant_scale", False, None)
    kv = part.values.get("kv_cache_quant_algo") == "FP8"
    return Quantization(_names(part, "exclude_modules"), kv, _producer(file))


def _read_inline(part: HFConfig) -> Quantization:
    if part.values.get("quant_method") != "modelopt":
        raise _refused(part, "quant_method", "modelopt")
    _only_fp8(part)
    part.only("kv_cache_scheme", None, _FLOAT8)
    for group in part.get("config_groups", dict, {}).values():
        if group != {"input_activations": _FLOAT8, "weights": _FLOAT8, "targets": ["Linear"]}:
            raise part.refuse("This quantization is not supported.", "config_groups", json.dumps(_FLOAT8))
    return Quantization(_names(part, "ignore"), part.values.get("kv_cache_scheme") is not None, _producer(part))


def _only_fp8(part: HFConfig) -> None:
    if part.values.get("quant_algo") != "FP8":
        raise _refused(part, "quant_algo", "FP8")


def _refused(part: HFConfig, key: str, expected: str) -> CheckpointError:
    fix = "start from the checkpoint from before it was quantized"
    return part.refuse("This quantization is not supported.", key, expected, fix)


def _names(part: HFConfig, key: str) -> tuple[str, ...]:
    names = part.get(key, list, [])
    if not all(isinstance(name, str) for name in names):
        raise part.refuse("This list may hold only names.", key, "names of modules")
    return tuple(names)


def _producer(config: HFConfig) -> tuple[str, str]:
    part = HFConfig(config.get("producer", dict, {}), f"{config.where}: producer")
    return part.get("name", str, "unknown"), part.get("version", str, "unknown")


def _summary(quantization: Quantization) -> str:
    return f"all but {', '.join(quantization.exclude)}{' and K/V' if quantization.kv else ''}"
