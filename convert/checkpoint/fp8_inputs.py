"""`d2sd_fp8.json` next to an FP8 drafter's config.json: scales of the layers that only d2sd runs in FP8.

    {"d2sd_fp8": 1, "input_scales": {"fc": 0.02, "layers.0.self_attn.q_proj": 0.05, …}}

TensorRT-LLM and vLLM slice K and V out of a fused projection and apply that without scales, and Edge-LLM refuses an FP8
`fc`. So the checkpoint holds these layers in 16 bits and describes them as unquantized. d2sd rounds their weights when
it loads them, with the scale that ModelOpt would store, and their inputs by this file, which other readers ignore.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from d2sd.errors import CheckpointError
from d2sd.io import read_json, write_json

NAME = "d2sd_fp8.json"
_SCHEMA = 1
_KEYS = {"d2sd_fp8", "input_scales"}


def read_fp8_inputs(directory: Path, layers: Collection[str]) -> dict[str, float]:
    """Return the input scale of each of `layers`, the linear layers stored in 16 bits; none if there is no file.

    Raises `CheckpointError` naming file and key.
    """
    path = directory / NAME
    if not path.exists():
        return {}
    values = read_json(path, error=CheckpointError)
    if not isinstance(values, dict) or values.keys() != _KEYS or values["d2sd_fp8"] != _SCHEMA:
        raise CheckpointError(
            "The scales have another schema.", where=path, found=json.dumps(values)[:80],
            expected=f"{sorted(_KEYS)}, the first {_SCHEMA}",
        )  # fmt: skip
    scales = values["input_scales"]
    if not isinstance(scales, dict) or scales.keys() != set(layers):
        odd = sorted(scales.keys() ^ set(layers)) if isinstance(scales, dict) else scales
        raise CheckpointError(
            "The scales are not those of the layers in 16 bits.", where=f"{path}: input_scales", found=odd
        )
    for name, scale in scales.items():
        if not isinstance(scale, float) or scale <= 0:
            raise CheckpointError(
                "A scale is not a positive number.", where=f"{path}: input_scales.{name}", found=json.dumps(scale)
            )
    return {name: scales[name] for name in layers}


def write_fp8_inputs(directory: Path, scales: Mapping[str, float]) -> None:
    """Write the file; without scales, delete one that an earlier drafter left."""
    if scales:
        write_json(directory / NAME, {"d2sd_fp8": _SCHEMA, "input_scales": dict(scales)})
    else:
        (directory / NAME).unlink(missing_ok=True)
