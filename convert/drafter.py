"""The z-lab DFlash directory, read and written: `config.json` and `model.safetensors`, no embedding, no head.

Read: every field of the layout; a field we do not know is refused, because the ones other projects add (projector,
shifted slots, causal or windowed blocks) change what the tensors mean. Written: every field, explicitly, because
readers fill gaps with defaults of their own. A second drafter says so with `dflash_config.training_mode: vp_drafter`.
A reduced draft vocabulary has no spelling there: it stands in a file of its own (`draft_vocab.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from d2sd.convert.draft_vocab import read_draft_vocabulary, write_draft_vocabulary
from d2sd.convert.hf_config import HFConfig, rope_fields
from d2sd.convert.weights import (
    check_headers,
    expected_shapes,
    fill,
    read_headers,
    read_tensors,
    write_tensors,
)
from d2sd.errors import CheckpointError
from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig, Role
from d2sd.modeling.drafter import Drafter

_MODES: dict[str, Role] = {"dflash": "first", "vp_drafter": "variable_prefix"}
#: Keys whose other values would mean another model; with these values they mean ours.
_NEUTRAL = {
    "architectures": (["DFlashDraftModel"],),
    "model_type": ("qwen3",),  # the body's shape, whatever the target's family
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
}
_NEUTRAL_DFLASH = {
    "is_causal": (False,),
    "causal": (False,),
    "use_swa": (False,),
    "swa_window_size": (None,),
    "use_aux_hidden_state": (True,),
}
#: Keys that say nothing about the forward pass.
_INERT = {
    "auto_map", "attention_dropout", "initializer_range", "use_cache", "max_window_layers", "tie_word_embeddings",
    "dtype", "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path",
}  # fmt: skip
_READ = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "attention_bias",
    "vocab_size", "block_size", "num_target_layers", "layer_types", "dflash_config",
}  # fmt: skip
_READ_DFLASH = {
    "mask_token_id", "target_layer_ids", "block_size", "num_target_layers", "training_mode", "prefix_weight_base",
    "mask_token",  # the id is what counts: the tokenizer may not know the token
}  # fmt: skip


def read_drafter_config(directory: Path) -> DrafterConfig:
    """Read a z-lab `config.json` and the draft vocabulary; raises `CheckpointError` naming file and key."""
    config = HFConfig.read(directory)
    dflash = config.part("dflash_config")
    _known(config, _READ | _INERT, _NEUTRAL)
    _known(dflash, _READ_DFLASH, _NEUTRAL_DFLASH)
    num_layers = config.size("num_hidden_layers")
    config.only("layer_types", ["full_attention"] * num_layers)
    bias = config.get("attention_bias", bool)
    mode = dflash.get("training_mode", str, "dflash")
    if mode not in _MODES:
        raise dflash.refuse("This kind of drafter is not supported.", "training_mode", " or ".join(_MODES))
    # Qwen3.5 drafters keep these two inside dflash_config.
    block_size, num_target_layers = (_either(config, dflash, key) for key in ("block_size", "num_target_layers"))
    base = dflash.values.get("prefix_weight_base")
    vocab_size, mask_token_id = config.size("vocab_size"), dflash.get("mask_token_id", int)
    return DrafterConfig(
        body=BodyConfig(
            hidden_size=config.size("hidden_size"),
            intermediate_size=config.size("intermediate_size"),
            num_layers=num_layers,
            num_heads=config.size("num_attention_heads"),
            num_kv_heads=config.size("num_key_value_heads"),
            head_dim=config.size("head_dim"),
            rms_norm_eps=config.get("rms_norm_eps", float),
            rope=config.rope(),
            max_positions=config.size("max_position_embeddings"),
            qk_norm=True,
            qkv_bias=bias,
            o_bias=bias,
        ),
        vocab_size=vocab_size,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=dflash.integers("target_layer_ids"),
        num_target_layers=num_target_layers,
        role=_MODES[mode],
        prefix_weight_base=None if base is None else dflash.get("prefix_weight_base", float),
        draft_vocabulary=read_draft_vocabulary(directory, vocab_size, mask_token_id),
    )


def _known(config: HFConfig, keys: set[str], neutral: Mapping[str, tuple[object, ...]]) -> None:
    for key, allowed in neutral.items():
        config.only(key, *allowed)
    unknown = sorted(config.values.keys() - keys - neutral.keys())
    if unknown:
        raise config.refuse("A drafter's config key is unknown, and may change its meaning.", unknown[0], "no such key")


def _either(config: HFConfig, dflash: HFConfig, key: str) -> int:
    """Return a size that may sit at the top level, inside dflash_config, or in both if they agree."""
    home = config if key in config.values else dflash
    value = home.size(key)
    if key in dflash.values and dflash.size(key) != value:
        raise dflash.refuse(f"{key} is written twice, differently.", key, value)
    return value


def check_fit(config: DrafterConfig, target: DecoderConfig, *, role: Role, block_size: int, where: Path) -> None:
    """Refuse a drafter that was not made for this target, this role or this block size.

    Every one of these would run, and quietly accept nothing.
    """
    body = config.body
    pairs: list[tuple[str, object, object]] = [
        ("dflash_config.training_mode", config.role, role),
        ("hidden_size", body.hidden_size, target.body.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("rope_theta and rope_scaling", body.rope, target.body.rope),
        ("num_target_layers", config.num_target_layers, target.body.num_layers),
    ]
    for key, found, expected in pairs:
        if found != expected:
            raise CheckpointError(
                "The drafter does not fit." if key.startswith("dflash") else "The drafter was made for another target.",
                where=f"{where / 'config.json'}: {key}", found=found, expected=expected,
            )  # fmt: skip
    ids = config.target_layer_ids
    ascending = all(a < b for a, b in pairwise(ids))
    if not ids or not ascending or ids[0] < 0 or ids[-1] >= target.body.num_layers:
        # fc's columns follow the config's order, and TensorRT-LLM sorts the ids: ascending means the same to all.
        raise CheckpointError(
            "The target layer ids are wrong.",
            where=f"{where / 'config.json'}: dflash_config.target_layer_ids",
            found=list(ids), expected=f"strictly ascending, 0 to {target.body.num_layers - 1}",
        )  # fmt: skip
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise CheckpointError(
            "The mask token lies outside the vocabulary.",
            where=f"{where / 'config.json'}: dflash_config.mask_token_id",
            found=config.mask_token_id, expected=f"0 to {config.vocab_size - 1}",
        )  # fmt: skip
    if config.block_size != block_size:
        raise CheckpointError(
            "The drafter was trained for another block size.",
            where=f"{where / 'config.json'}: block_size", found=config.block_size, expected=block_size,
            fix=f"set tree.block_size to {config.block_size} in the recipe",
        )  # fmt: skip


def drafter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a drafter's tensors."""
    return expected_shapes(_empty(config))


def check_drafter_tensors(directory: Path, config: DrafterConfig) -> None:
    """Check names, shapes and types of a drafter's tensors from headers alone."""
    check_headers(directory, read_headers(directory), drafter_shapes(config), lambda name: name)


def load_drafter(directory: Path, dtype: torch.dtype) -> Drafter:
    """Read a drafter onto the CPU in `dtype`, in eval mode and without gradients."""
    module = _empty(read_drafter_config(directory))
    tensors: dict[str, Tensor] = {}
    for _, part in read_tensors(directory, expected_shapes(module), dtype):
        tensors |= part
    fill(module, tensors)
    return module


def write_drafter(directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a drafter's directory; `tensors` is `Drafter.state_dict()`, of one dtype."""
    expected = drafter_shapes(config)
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert given == expected, f"not this drafter's tensors: {sorted(given.items() ^ expected.items())}"
    (dtype,) = {tensor.dtype for tensor in tensors.values()}
    write_tensors(directory / "model.safetensors", tensors)
    fields = _fields(config) | {"dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", "utf-8")
    write_draft_vocabulary(directory, config.draft_vocabulary, config.vocab_size)


def _empty(config: DrafterConfig) -> Drafter:
    with torch.device("meta"):
        return Drafter(config)


def _fields(config: DrafterConfig) -> dict[str, object]:
    body = config.body
    assert body.qk_norm, "the layout has no spelling for a drafter without q/k norms"
    assert body.qkv_bias == body.o_bias, "the layout has one attention_bias for q, k, v and o"
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": body.qkv_bias,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "is_causal": False,
            "mask_token_id": config.mask_token_id,
            "num_target_layers": config.num_target_layers,
            "prefix_weight_base": config.prefix_weight_base,
            "target_layer_ids": list(config.target_layer_ids),
            "training_mode": next(mode for mode, role in _MODES.items() if role == config.role),
        },
        "head_dim": body.head_dim,
        "hidden_act": "silu",
        "hidden_size": body.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": body.intermediate_size,
        "layer_types": ["full_attention"] * body.num_layers,
        "max_position_embeddings": body.max_positions,
        "max_window_layers": body.num_layers,
        "model_type": "qwen3",
        "num_attention_heads": body.num_heads,
        "num_hidden_layers": body.num_layers,
        "num_key_value_heads": body.num_kv_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": body.rms_norm_eps,
        **rope_fields(body.rope),
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def fingerprint(drafter: Drafter) -> str:
    """SHA-256 of a drafter's weights in bf16, by name, and of its draft vocabulary: all that decides what it says.

    It is the same in fp32 and bf16, of which drafters come.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(f"{name} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    if drafter.config.draft_vocabulary is not None:
        digest.update(f"draft_vocabulary {list(drafter.config.draft_vocabulary)}".encode())
    return digest.hexdigest()
