"""Which format a drafter's `config.json` is, from the config alone."""

from __future__ import annotations

import json

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.formats import modelopt, specforge
from d2sd.convert.formats.canonical import Format
from d2sd.convert.formats.unsupported import refuse_foreign
from d2sd.errors import CheckpointError


def detect(config: HFConfig) -> Format:
    """Name the format; raises `CheckpointError` for another model, or for no drafter at all, with what was seen."""
    refuse_foreign(config)
    values = config.values
    if values.get("speculators_model_type") is not None:
        if values["speculators_model_type"] != "dflash":
            raise config.refuse("This kind of speculator is not supported.", "speculators_model_type", "dflash")
        return "speculators"
    if "dflash_config" in values or values.get("architectures") == ["DFlashDraftModel"]:
        if specforge.looks_like(config):
            return "specforge"
        return "modelopt" if modelopt.looks_like(config) else "z-lab"
    seen = {key: values[key] for key in ("architectures", "model_type") if key in values}
    raise CheckpointError(
        "No drafter's format is recognised.", where=config.where,
        found=f"{json.dumps(seen)[1:-1] or 'none of the known keys'}; no dflash_config, no speculators_model_type",
        expected="z-lab, ModelOpt or SpecForge (dflash_config), or speculators (speculators_model_type)",
    )  # fmt: skip
