"""`d2sd_fp8.json` next to an FP8 drafter's config.json: scales of the layers that only d2sd runs in FP8.

    {"d2sd_fp8": 1, "input_scales": {"fc": 0.02, "layers.0.self_attn.q_proj": 0.05, …}}

TensorRT-LLM and vLLM slice K and V out of a fused projection and apply that without scales, and Edge-LLM refuses an FP8
`fc`. So the checkpoint holds these layers in 16 bits and describes them as unquantized. d2sd rounds their weights when
it loads them, with the scale that ModelOpt would store, and their inputs by this file, which other readers ignore.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from d2sd.errors import CheckpointError
from d2sd.io import write_json
from d2sd.schema import read_model

NAME = "d2sd_fp8.json"
#: A positive number that fp32 holds with all its digits.
Scale = Annotated[float, Field(ge=2.0**-126, lt=2.0**128)]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    d2sd_fp8: Literal[1]
    input_scales: dict[str, Scale]


def read_fp8_inputs(directory: Path, layers: Collection[str]) -> dict[str, float]:
    """Return the input scale of each of `layers`, the linear layers stored in 16 bits; none if there is no file.

    Raises `CheckpointError` naming file and key.
    """
    path = directory / NAME
    if not path.exists():
        return {}
    version = ("d2sd_fp8", 1)
    scales = read_model(_File, path, error=CheckpointError, what="file of FP8 scales", version=version).input_scales
    if scales.keys() != set(layers):
        raise CheckpointError(
            "The scales are not those of the layers in 16 bits.", where=f"{path}: input_scales",
            found=sorted(scales.keys() ^ set(layers)),
        )  # fmt: skip
    return {name: scales[name] for name in layers}


def write_fp8_inputs(directory: Path, scales: Mapping[str, float]) -> None:
    """Write the file; without scales, delete one that an earlier drafter left."""
    if scales:
        write_json(directory / NAME, {"d2sd_fp8": 1, "input_scales": dict(scales)})
    else:
        (directory / NAME).unlink(missing_ok=True)
