"""The parts that layouts of drafters share: the body's keys, layer ids, the role, and the checks that a drafter fits.

The Qwen3-shaped body of a config is at the top level (z-lab) or nested (speculators). All conversions of target layer
ids are in this file; a drafter read with the wrong convention runs, and is accepted slightly less: only the format
determines the convention.

    convention          id i means                            formats
    output_of_layer     output of layer i, hidden_states[i+1] z-lab, ModelOpt, SpecForge; `DrafterConfig`
    hidden_states       hidden_states[i]; 0 is the embedding  speculators

The role, first or variable-prefix, is in keys that SpecForge's training writes into the config. A run with
`--loss-type vp_drafter` and a config without `training_mode` writes a variable-prefix drafter that looks like a first
one: the loss type is only in `training_state.pt`, a pickle, which is never opened. The user then has to declare the
role (`declared`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from d2sd.convert.checkpoint.attention import layer_fields
from d2sd.convert.checkpoint.hf_config import MAX_SIZE, HFConfig, rope_fields
from d2sd.convert.checkpoint.quantization import FILE, KEY, read_drafter_quantization
from d2sd.errors import CheckpointError
from d2sd.modeling.config import BodyConfig, DecoderConfig, DraftConfig, Role, RopeConfig

if TYPE_CHECKING:
    from torch import Tensor

#: Keys that `read_body` reads.
READ = frozenset({
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "attention_bias",
    "vocab_size", "hidden_act", "model_type",
})  # fmt: skip
#: Keys that do not affect the forward pass.
INERT = frozenset({
    "auto_map", "attention_dropout", "initializer_range", "use_cache", "max_window_layers", "tie_word_embeddings",
    "dtype", "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path",
})  # fmt: skip


def read_body(config: HFConfig) -> BodyConfig:
    """Read the body but what its layers see (`attention.py`); raises `CheckpointError` naming file and key."""
    num_layers, heads = config.layers("num_hidden_layers"), config.size("num_attention_heads")
    config.only("model_type", "qwen3")  # the body's shape, whatever the target's family
    config.only("hidden_act", "silu")
    bias = config.get("attention_bias", bool, False)  # transformers' default of Qwen3
    return BodyConfig(
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=config.size("num_key_value_heads"),
        head_dim=config.size("head_dim", limit=MAX_SIZE // heads),
        rms_norm_eps=config.get("rms_norm_eps", float),
        rope=config.rope(),
        max_positions=config.size("max_position_embeddings"),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )


def body_fields(body: BodyConfig) -> dict[str, object]:
    """Every field of a DFlash drafter's body except RoPE, which the formats spell differently."""
    assert body.qk_norm, "no layout can represent a drafter without q/k norms"
    assert body.qkv_bias == body.o_bias, "the layouts have one attention_bias for q, k, v and o"
    return {
        **geometry_fields(body),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_window_layers": body.num_layers,
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "use_cache": True,
        **layer_fields(body),
    }


def geometry_fields(body: BodyConfig) -> dict[str, object]:
    """The fields that configs of all kinds of drafters share."""
    return {
        "attention_bias": body.o_bias,
        "head_dim": body.head_dim,
        "hidden_act": "silu",
        "hidden_size": body.hidden_size,
        "intermediate_size": body.intermediate_size,
        "max_position_embeddings": body.max_positions,
        "num_attention_heads": body.num_heads,
        "num_hidden_layers": body.num_layers,
        "num_key_value_heads": body.num_kv_heads,
        "rms_norm_eps": body.rms_norm_eps,
    }


def from_hidden_states(ids: Sequence[int]) -> tuple[int, ...]:
    """Ids of hidden states -> ids of `DrafterConfig`."""
    return tuple(i - 1 for i in ids)


def to_hidden_states(ids: Sequence[int]) -> list[int]:
    """Ids of `DrafterConfig` -> ids of hidden states."""
    return [i + 1 for i in ids]


def fault(ids: Sequence[int], num_target_layers: int) -> str | None:
    """Describe valid ids if these ids of `DrafterConfig` are invalid; None if they are valid, in any order."""
    if ids and len(set(ids)) == len(ids) and min(ids) >= 0 and max(ids) < num_target_layers:
        return None
    return f"ids of different layers, 0 to {num_target_layers - 1}"


def usual_ids(num_layers: int, num_target_layers: int) -> list[int]:
    """Defaults of z-lab and SGLang for a config without ids: evenly spaced from layer 1 to L - 3.

    Only for messages: a drafter trained with other ids would run with these and almost never be accepted.
    """
    if num_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 3 - 1) / (num_layers - 1)
    return [round(1 + index * step) for index in range(num_layers)]


def sort_columns(fc: Tensor, ids: Sequence[int]) -> Tensor:
    """fc [E, n·E], whose n column blocks follow `ids`, with the blocks in ascending order of the ids."""
    import torch

    order = sorted(range(len(ids)), key=lambda index: ids[index])
    blocks = fc.chunk(len(ids), dim=1)
    return torch.cat([blocks[index] for index in order], dim=1)


#: Values of `training_mode`, or of `loss_type` without it. D-PACE is a weighting of the first drafter's loss.
ROLES: dict[str, Role] = {
    "dflash": "first",
    "dpace": "first",
    "dpace-cumulative-confidence-only": "first",
    "dpace-continuation-value-only": "first",
    "vp_drafter": "variable_prefix",
}
#: Keys of `dflash_config` that training writes.
TRAINING = frozenset({"training_mode", "loss_type", "prefix_weight_base"})


def read_role(dflash: HFConfig, declared: Role | None) -> tuple[Role, float | None]:
    """Role and prefix weight base of a `dflash_config`; raises `CheckpointError` if they contradict each other."""
    key = "training_mode" if dflash.values.get("training_mode") is not None else "loss_type"
    mode = dflash.get(key, str, "")
    if mode and mode not in ROLES:
        raise dflash.refuse("This kind of drafter is not supported.", key, " or ".join(ROLES))
    role = ROLES.get(mode, declared or "first")
    if declared not in (None, role):
        raise dflash.refuse("The declared role contradicts the config.", key, f"no {key}, or {declared}")
    if dflash.values.get("prefix_weight_base") is None:
        return role, None
    if role == "first":
        raise dflash.refuse(
            "prefix_weight_base is set, but this is not a variable-prefix drafter.",
            "prefix_weight_base",
            "null, or training_mode vp_drafter",
            fix="declare it: --role variable_prefix",
        )
    return role, dflash.get("prefix_weight_base", float)


def misfit(
    what: str, folder: Path, key: str, found: object, expected: object, fix: str | None = None
) -> CheckpointError:
    """An error of a drafter whose config does not fit what it is to run with."""
    return CheckpointError(what, where=f"{folder / 'config.json'}: {key}", found=found, expected=expected, fix=fix)


_FIX = "use a drafter that was trained for this target"


def check_geometry(
    pairs: Iterable[tuple[str, object, object]], config: DraftConfig, target: DecoderConfig, where: Path
) -> None:
    """Refuse a drafter of another target: where a key's value, in `pairs`, is not the target's, or the positions."""
    for key, found, expected in pairs:
        if found != expected:
            raise misfit("The drafter was made for another target.", where, key, found, expected, _FIX)
    _check_rope(config.body.rope, target.body.rope, where)


def _check_rope(found: RopeConfig, expected: RopeConfig, where: Path) -> None:
    """Refuse positions other than the target's: the drafter reads the target's features at them."""
    if rope_fields(found) == rope_fields(expected):  # what a kind does not use does not count
        return
    fix = _FIX
    if expected.kind == "yarn" and found == RopeConfig(theta=expected.theta):
        longest = f"{expected.original_max_positions:,} tokens"
        fix = (
            f"remove the scaling from the target's config.json, and serve contexts of up to {longest}; or train with it"
        )
    what, key = "The drafter was made for another target: its positions (RoPE) differ.", "rope_theta and rope_scaling"
    raise misfit(what, where, key, json.dumps(rope_fields(found)), json.dumps(rope_fields(expected)), fix)


def refuse_fp8(directory: Path, config: HFConfig, layers: Iterable[str], what: str, *, expected: str, fix: str) -> None:
    """Refuse a drafter with FP8 in one of `layers`, or of K/V."""
    quantization = read_drafter_quantization(directory, config)
    narrow = quantization.of(layers) if quantization else []
    if narrow or (quantization and quantization.kv):
        raise CheckpointError(
            what, where=f"{directory}: {FILE} or {KEY}", found=", ".join(narrow) or "K/V", expected=expected, fix=fix
        )
