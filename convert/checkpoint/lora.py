"""LoRA adapters in peft's layout, added to a target's weights: W + scale · α / r · B A (arXiv 2106.09685).

    adapter_config.json          r, lora_alpha, use_rslora (α / √r in place of α / r), alpha_pattern by name of a module
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight [r, in], .lora_B.weight [out, r]

An adapter that changes the model in another way too is refused by key or by tensor. Headers alone are read here, for
plans too; `target.py` merges.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d2sd.convert.checkpoint.headers import Rename, Shapes, TensorInfo, has_weights, read_header, read_headers
from d2sd.convert.checkpoint.quantization import Quantization
from d2sd.convert.checkpoint.target_shapes import our_name, target_shapes
from d2sd.errors import CheckpointError
from d2sd.io import read_json
from d2sd.modeling.config import DecoderConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
#: Values of keys of peft's config, in addition to null, that change no more than these products. A name for how the
#: weights began stands for a base that was changed as well, but for three.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
#: Keys that say how an adapter was trained, or that its tensors say, or that are read by themselves. All others are of
#: another method each, which is off where the value is one of `_OFF`.
_KNOWN = {
    *("r", "lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora", "lora_dropout", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "task_type", "auto_mapping", "peft_version"),
    *("base_model_name_or_path", "revision", "inference_mode", "runtime_config", "qalora_group_size"),
    *("megatron_config", "megatron_core", "eva_config", "loftq_config", "corda_config", "lora_ga_config"),
    "ensure_weight_tying",
}
_OFF: tuple[Any, ...] = (False, [], {})


@dataclass(frozen=True, slots=True)
class Adapter:
    """Holds pairs of matrices whose products are added to the weights of a target, by their names in our module."""

    file: Path
    parts: Mapping[str, tuple[str, str, float]]  # names of A and B in the file, and the factor of their product

    @staticmethod
    def read(folder: Path, scale: float, shapes: Shapes, rename: Rename) -> Adapter:
        """Read an adapter's headers, and check them against the `shapes` of a target, which `rename` names.

        Raises CheckpointError.
        """
        config, file = _config(folder), folder / WEIGHTS
        headers = read_header(file)
        pairs: dict[str, dict[str, str]] = {}
        for name in headers:
            found = _NAME.fullmatch(name)
            if found is None:
                raise CheckpointError(
                    "A tensor of the adapter is not of a LoRA.",
                    where=f"{file}: {name}",
                    expected="base_model.model.<module>.lora_A.weight or lora_B.weight",
                    fix="merge it with peft's merge_and_unload, and build from the folder that is saved",
                )
            pairs.setdefault(found["module"], {})[found["part"]] = name
        if not pairs:
            raise CheckpointError("The adapter is empty.", where=file)
        parts: dict[str, tuple[str, str, float]] = {}
        for module, pair in pairs.items():
            ours = rename(f"{module}.weight")
            if ours is None or ours not in shapes or ours in parts:
                raise CheckpointError(
                    "The target has no such layer, stores it in another way, or the adapter has it twice.",
                    where=f"{file}: {module}",
                    fix="use the target that the adapter was trained on",
                )
            rank = _rank(file, module, pair, headers, shapes[ours])
            parts[ours] = pair["A"], pair["B"], scale * _factor(folder / CONFIG, config, module, rank)
        return Adapter(file, parts)


def read_adapters(
    source: Path, config: DecoderConfig, quantization: Quantization | None, adapters: Sequence[tuple[Path, float]]
) -> list[Adapter]:
    """Folders of LoRAs with their scales, checked against the target in `source`. Raises CheckpointError."""
    if quantization is not None and adapters:
        raise CheckpointError(
            "A LoRA cannot be merged into quantized weights.",
            where=source,
            found=quantization.text,
            fix="set target.dequantize to true, or merge it before the target is quantized",
        )
    names = read_headers(source).keys() if source.is_dir() and has_weights(source) else ()
    shapes = target_shapes(config, None, names)
    return [Adapter.read(folder, scale, shapes, our_name(config)) for folder, scale in adapters]


def _config(folder: Path) -> dict[str, Any]:
    """The config of an adapter. Raises CheckpointError where it is more than a LoRA."""
    where = folder / CONFIG
    if not folder.is_dir():
        raise CheckpointError(
            "The folder of a LoRA adapter does not exist.",
            where=folder,
            fix="correct target.lora, or download the adapter there",
        )
    config = read_json(where, error=CheckpointError)
    if not isinstance(config, dict):
        raise CheckpointError("The adapter's config is not a mapping.", where=where, found=config)
    for key in sorted(config.keys() - _KNOWN):
        value, plain = config[key], _PLAIN.get(key, _OFF)
        if value is not None and not any(value == one and type(value) is type(one) for one in plain):
            raise CheckpointError(
                "The adapter is not a plain LoRA.",
                where=f"{where}: {key}",
                found=value,
                expected=" or ".join(map(repr, plain)),
                fix="merge it with peft's merge_and_unload, and build from the folder that is saved",
            )
    return config


def _rank(
    file: Path, module: str, pair: Mapping[str, str], headers: Mapping[str, TensorInfo], shape: tuple[int, ...]
) -> int:
    """The rank of a pair for a weight [out, in]."""
    if missing := sorted({"A", "B"} - pair.keys()):
        raise CheckpointError("The adapter lacks a tensor.", where=f"{file}: {module}.lora_{missing[0]}.weight")
    a, b = (headers[pair[part]].shape for part in "AB")
    rank = a[0] if a else 0
    if len(shape) != 2 or not rank or a != (rank, shape[1]) or b != (shape[0], rank):
        raise CheckpointError(
            "The adapter's tensors are not of this layer.",
            where=f"{file}: {module}",
            found=f"A {list(a)}, B {list(b)}",
            expected=f"the layer's weight, {list(shape)}, as B A",
            fix="use the target that the adapter was trained on",
        )
    return rank


def _factor(where: Path, config: Mapping[str, Any], module: str, rank: int) -> float:
    """α / r, or α / √r; α by the first pattern that is the module's name or the end of it."""
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError("alpha_pattern is not a mapping.", where=where, found=patterns)
    for pattern in patterns:  # a regular expression of a checkpoint is not run
        if re.escape(pattern).replace(r"\.", ".") != pattern:
            raise CheckpointError(
                "A pattern of the adapter is a regular expression.",
                where=f"{where}: alpha_pattern",
                found=pattern,
                fix="write the names of modules in its place",
            )
    own = next((patterns[key] for key in patterns if module == key or module.endswith(f".{key}")), None)
    alpha, key = (config.get("lora_alpha"), "lora_alpha") if own is None else (own, "alpha_pattern")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise CheckpointError("The adapter's alpha is not a number.", where=f"{where}: {key}", found=alpha)
    rooted = config.get("use_rslora")
    if rooted not in (None, True, False):
        raise CheckpointError("A switch is not a truth value.", where=f"{where}: use_rslora", found=rooted)
    return float(alpha) / (math.sqrt(rank) if rooted else rank)
