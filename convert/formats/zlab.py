"""The z-lab DFlash directory, written: every field, because readers fill gaps with defaults of their own.

Edge-LLM alone would take block size 16, mask 248070, layers 1, 8, 15, 22, 29 and a causal block. There is no embedding
and no head: they are the target's. A second drafter says so with `training_mode: vp_drafter`, as SpecForge does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from d2sd.convert.checkpoint.hf_config import rope_fields
from d2sd.convert.formats.backbone import INERT, body_fields
from d2sd.convert.formats.layer_ids import to_convention
from d2sd.modeling.config import DrafterConfig


def config_text(config: DrafterConfig, dtype: torch.dtype, quantization: Mapping[str, object] | None = None) -> str:
    """The text of `config.json`; `quantization` is its `quantization_config`."""
    fields = _fields(config) | {"dtype": str(dtype).removeprefix("torch.")}
    fields |= {} if quantization is None else {"quantization_config": quantization}
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def left_to_readers(text: str, config: DrafterConfig) -> list[str]:
    """Names of fields that decide what `config` is and that `text`, of this layout, leaves to its reader's defaults."""
    values, ours = json.loads(text), _fields(config)
    inside, wanted = values["dflash_config"], ours["dflash_config"]
    assert isinstance(wanted, dict)
    said = values.keys() | inside.keys()
    said |= {"rope_theta", "rope_scaling"} if "rope_parameters" in said else set()
    said |= {"is_causal"} if "causal" in said else set()
    return [*(key for key in ours if key not in said | INERT), *(f"dflash_config.{k}" for k in wanted if k not in said)]


def _fields(config: DrafterConfig) -> dict[str, object]:
    return {
        **body_fields(config.body),
        **rope_fields(config.body.rope),
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "is_causal": False,
            "mask_token_id": config.mask_token_id,
            "num_target_layers": config.num_target_layers,
            "prefix_weight_base": config.prefix_weight_base,
            "target_layer_ids": to_convention(config.target_layer_ids, "output_of_layer"),
            "training_mode": "dflash" if config.role == "first" else "vp_drafter",
        },
        "num_target_layers": config.num_target_layers,
        "vocab_size": config.vocab_size,
    }
