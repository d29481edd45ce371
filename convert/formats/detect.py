"""Detects the format of a drafter from its `config.json` alone.

    speculators    speculators_model_type: dflash
    specforge      the DFlash layout (dflash_config) with keys of SpecForge's training, or the target's architecture
    modelopt       the DFlash layout with the dtype under its old name and no remote code
    z-lab          the DFlash layout otherwise

One reader reads all dialects of the DFlash layout (`checkpoint/dflash.py`); `checkpoint/unsupported.py` lists
models that are recognised and refused. ModelOpt's Domino, DSpark and windowed exports keep DFlash's architecture name
and differ only in their keys.
"""

from __future__ import annotations

import json

from d2sd.convert.checkpoint.dflash import TARGETS_OWN
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.roles import TRAINING
from d2sd.convert.checkpoint.unsupported import refuse_unsupported
from d2sd.convert.formats.canonical import Format
from d2sd.errors import CheckpointError

#: Files next to the weights that mark a quantized checkpoint (ModelOpt's export and its older names), which is refused.
QUANTIZED = ("hf_quant_config.json", "quantize_config.json", "quant_cfg.json")
#: Files of SpecForge's training next to the weights; pickles, so never opened.
PICKLES = ("training_state.pt",)


def detect(config: HFConfig) -> Format:
    """Return the format. Raises `CheckpointError` for an unsupported model and for an unknown format."""
    refuse_unsupported(config)
    values = config.values
    if values.get("speculators_model_type") is not None:
        if values["speculators_model_type"] != "dflash":
            raise config.refuse("This kind of speculator is not supported.", "speculators_model_type", "dflash")
        return "speculators"
    if "dflash_config" in values or values.get("architectures") == ["DFlashDraftModel"]:
        if _is_specforge(config):
            return "specforge"
        return "modelopt" if _is_modelopt(config) else "z-lab"
    seen = {key: values[key] for key in ("architectures", "model_type") if key in values}
    raise CheckpointError(
        "The drafter's format is not recognised.", where=config.where,
        found=f"{json.dumps(seen)[1:-1] or 'none of the known keys'}; no dflash_config, no speculators_model_type",
        expected="z-lab, ModelOpt or SpecForge (dflash_config), or speculators (speculators_model_type)",
    )  # fmt: skip


def _is_specforge(config: HFConfig) -> bool:
    """Whether a DFlash layout has keys of SpecForge's training, or the target's architecture (trained with no config).

    d2sd's own z-lab files have such keys too, and `is_causal`, which SpecForge never writes.
    """
    dflash = config.values.get("dflash_config")
    inside = dflash.keys() if isinstance(dflash, dict) else set()
    trained = bool(TRAINING & inside) and "is_causal" not in inside
    return trained or config.values.get("architectures") == [TARGETS_OWN]


def _is_modelopt(config: HFConfig) -> bool:
    """Whether a DFlash layout names its dtype as ModelOpt does, and has no remote code."""
    return "torch_dtype" in config.values and not {"dtype", "auto_map"} & config.values.keys()
