"""Checkpoints of models that read images or audio, too: what of them is the text model.

    config.json   its keys are in `text_config`; those of quantization, and whether the head is tied, are outside
    tensors       `model.language_model.` instead of `model.`; those of `_OTHERS` are left out

Everything else of d2sd reads and writes the text model by itself, under the names that transformers gives it alone.
"""

from __future__ import annotations

from typing import Any

from d2sd.convert.checkpoint.hf_config import HFConfig

#: Kind of the whole model -> kind of its text model.
NESTED = {name: f"{name}_text" for name in ("qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_unified")}
#: Beginnings of the names of what reads images and audio, and of layers that draft one token behind the last.
_OTHERS = (
    "model.visual.", "visual.", "model.vision_", "model.embed_vision.", "model.audio_", "model.embed_audio.", "mtp.",
)  # fmt: skip
_PART, _INSIDE = "text_config", "language_model"
#: Keys outside `text_config` that are the text model's.
_OUTSIDE = ("quantization_config", "tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype")


def text_config(config: HFConfig) -> HFConfig:
    """The config of the text model alone, of a model of `NESTED`; of others, the same config.

    Raises `CheckpointError` where the two parts disagree.
    """
    kind = config.values.get("model_type")
    if not isinstance(kind, str) or kind not in NESTED:
        return config
    part = config.part(_PART)
    part.only("model_type", NESTED[kind], None)
    tied = "tie_word_embeddings"
    if tied in config.values and part.values.get(tied) not in (None, config.values[tied]):
        raise part.refuse("Whether the head is tied is given twice, differently.", tied, config.values[tied])
    outside = {key: config.values[key] for key in _OUTSIDE if config.values.get(key) is not None}
    values = part.values | without_prefix(outside) | {"model_type": NESTED[kind]}
    return HFConfig(values, f"{config.where}: {_PART}")


def without_prefix(value: Any) -> Any:
    """A description with the names of modules that the text model has alone, in regular expressions as well."""
    if isinstance(value, dict):
        return {key: without_prefix(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_prefix(inner) for inner in value]
    if isinstance(value, str):
        return value.replace(f"model.{_INSIDE}.", "model.").replace(rf"model\.{_INSIDE}\.", r"model\.")
    return value


def text_name(name: str) -> str | None:
    """The name that a tensor or module has in the text model alone; None: it is one of `_OTHERS`, which d2sd
    leaves out.
    """
    if name.startswith(_OTHERS):
        return None
    return name.replace(f"model.{_INSIDE}.", "model.", 1)
